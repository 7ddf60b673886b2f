"""``dequantize -> linear -> [clamp] -> quantize`` becomes ``x86quant.linear``."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.passes._epilogue import Lowered, lower
from x86quant.lowering.passes._weights import quantized_operands


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of linears lowered."""
    return lower(gm, torch.ops.aten.linear.default, rule)


def rule(gm: GraphModule, node: Node) -> Lowered:
    """The linear of ours that computes what ``node`` does, if its operands are quantized."""
    operands = quantized_operands(gm, node, 1)
    return None if operands is None else ("linear", operands)
