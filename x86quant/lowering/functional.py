"""Exported programs without writes in place."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import Node

from x86quant.errors import UnsupportedError


def functionalized(program: ExportedProgram) -> ExportedProgram:
    """``program`` without ops that write in place.

    Raises:
        UnsupportedError: ``out=`` gives a tensor another shape, where torch ends the process if
            there are views of it.
    """
    for node in program.graph.nodes:
        out = node.kwargs.get("out")
        if isinstance(out, Node) and _shape(out) != _shape(node):
            raise UnsupportedError(f"{node.target} gives its out= another shape")
    found: ExportedProgram = program.run_decompositions({})  # of no op
    return found


def _shape(node: Node) -> list[str]:
    return [str(size) for size in getattr(node.meta.get("val"), "shape", ())]
