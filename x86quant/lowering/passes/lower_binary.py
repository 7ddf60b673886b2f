"""Sum and product of two quantized tensors become ``x86quant.add`` and ``x86quant.mul``."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import dequantized, scale_and_zp, why
from x86quant.lowering.passes._epilogue import Lowered, lower

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of ops lowered."""
    changed = lower(gm, aten.add.Tensor, lambda _, node: _rule("add", node))
    return changed + lower(gm, aten.mul.Tensor, lambda _, node: _rule("mul", node))


def _rule(name: str, node: Node) -> Lowered:
    a, b = (dequantized(value) for value in node.args)
    if a is None or b is None:
        why(node, "one of its inputs is not quantized")
        return None
    return name, {"a": a, "b": b, **scale_and_zp("a", a), **scale_and_zp("b", b)}
