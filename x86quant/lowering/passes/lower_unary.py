"""A chain of unary float ops between two quantized tensors becomes a 256-entry table.

The chain itself is evaluated on the 256 reals that the codes can be, so any elementwise function
of one tensor is covered, alone or followed by others.
"""

from __future__ import annotations

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
from x86quant.lowering.normalize import UNARY


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of tables made."""
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        chain, codes = _chain(gm, quantize)
        if codes is None or not chain:
            continue
        table = _evaluate(gm, chain, quantize, codes)
        with gm.graph.inserting_before(quantize):
            node = add_constant(gm, gm.graph, f"{chain[0].name}_table", table)
            new = emit(gm.graph, "lut", quantize, x=codes, table=node)
        new.meta["qparams"] = qparams_of(quantize)
        replace(quantize, new)
        changed += 1
    return finish(gm, changed)


def _chain(gm: GraphModule, quantize: Node) -> tuple[list[Node], Node | None]:
    """The unary ops from codes to ``quantize``, first to last, and the codes they start from."""
    chain: list[Node] = []
    value = quantize.kwargs["x"]
    while isinstance(value, Node) and value.target in UNARY and _is_elementwise(gm, value):
        chain.insert(0, value)
        value = value.args[0]
    codes = dequantized(value)
    if codes is None and chain:
        why(chain[-1], "its input is not quantized")
    return chain, codes


def _is_elementwise(gm: GraphModule, node: Node) -> bool:
    for argument in node.args[1:]:
        tensor = constant(gm, argument)
        if isinstance(argument, Node) and (tensor is None or tensor.numel() > 1):
            why(node, "its parameter is not one constant")
            return False
    return True


def _evaluate(gm: GraphModule, chain: list[Node], quantize: Node, codes: Node) -> torch.Tensor:
    inputs = torch.arange(256, dtype=torch.uint8)
    value = op("dequantize")(inputs, **scale_and_zp("x", codes))
    for node in chain:
        parameters = [
            constant(gm, argument) if isinstance(argument, Node) else argument
            for argument in node.args[1:]
        ]
        assert callable(node.target)
        value = node.target(value, *parameters, **node.kwargs)
    table: torch.Tensor = op("quantize")(value, **scale_and_zp("out", quantize))
    return table
