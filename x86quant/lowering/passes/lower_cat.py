"""Concatenation of quantized tensors becomes ``x86quant.cat``."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import dequantized, qparams_of, why
from x86quant.lowering.passes._epilogue import Lowered, lower


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of concatenations lowered."""
    return lower(gm, torch.ops.aten.cat.default, _rule, clamps=False)


def _rule(gm: GraphModule, node: Node) -> Lowered:
    codes = [dequantized(value) for value in node.args[0]]  # type: ignore[union-attr]
    known = [value for value in codes if value is not None]
    if len(known) < len(codes):
        why(node, "one of its inputs is not quantized")
        return None
    qparams = [qparams_of(value) for value in known]
    return "cat", {
        "xs": known,
        "dim": node.args[1],
        "x_scales": [q.scale for q in qparams],
        "x_zps": [q.zero_point for q in qparams],
    }
