"""A function of one quantized tensor becomes a 256-entry table, in however many float ops it is.

The ops themselves are evaluated on the 256 reals that the codes can be, so any elementwise function
of one tensor is covered, alone or followed by others, and any formula that joins such.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    dequantized,
    emit,
    finish,
    nodes_of,
    op,
    qparams_of,
    replace,
    scale_and_zp,
    why,
)
from x86quant.lowering.normalize import JOINS, UNARY

#: A formula has at most so many steps.
_MOST_STEPS = 64


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of tables made."""
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        steps, sources = _function(gm, quantize)
        codes = {dequantized(source) for source in sources}
        if not steps or len(codes) != 1 or None in codes:
            if steps and len(sources) == 1:
                why(steps[0], "its input is not quantized")
            continue
        table = _evaluate(gm, steps, quantize, sources)
        with gm.graph.inserting_before(quantize):
            node = add_constant(gm, gm.graph, f"{steps[0].name}_table", table)
            new = emit(gm.graph, "lut", quantize, x=codes.pop(), table=node)
        new.meta["qparams"] = qparams_of(quantize)
        replace(quantize, new)
        changed += 1
    return finish(gm, changed)


def _function(gm: GraphModule, quantize: Node) -> tuple[list[Node], set[Node]]:
    """The elementwise ops that lead to ``quantize``, in order, and what they start from."""
    steps: dict[Node, None] = {}
    sources: set[Node] = set()
    waiting: list[Any] = [quantize.kwargs["x"]]
    while waiting and len(steps) <= _MOST_STEPS:
        value = waiting.pop()
        if value in steps or value in sources:
            continue
        if value.target in JOINS and all(isinstance(x, Node) for x in value.args):
            steps[value] = None
            waiting += value.args
        elif value.target in UNARY and _is_elementwise(gm, value):
            steps[value] = None
            waiting.append(value.args[0])
        else:
            sources.add(value)
    return [node for node in gm.graph.nodes if node in steps] if steps else [], sources


def _is_elementwise(gm: GraphModule, node: Node) -> bool:
    for argument in node.args[1:]:
        tensor = constant(gm, argument)
        if isinstance(argument, Node) and (tensor is None or tensor.numel() > 1):
            why(node, "its parameter is not one constant")
            return False
    return True


def _evaluate(
    gm: GraphModule, steps: list[Node], quantize: Node, sources: set[Node]
) -> torch.Tensor:
    inputs = torch.arange(256, dtype=torch.uint8)
    values: dict[Any, Any] = {
        source: op("dequantize")(inputs, **scale_and_zp("x", source.kwargs["x"]))  # type: ignore[arg-type]
        for source in sources
    }
    for node in steps:
        arguments = [
            values.get(argument, constant(gm, argument)) if isinstance(argument, Node) else argument
            for argument in node.args
        ]
        assert callable(node.target)
        values[node] = node.target(*arguments, **node.kwargs)
    table: torch.Tensor = op("quantize")(values[steps[-1]], **scale_and_zp("out", quantize))
    return table
