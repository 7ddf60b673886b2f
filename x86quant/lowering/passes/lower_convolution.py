"""``dequantize -> convolution -> [clamp] -> quantize`` becomes ``x86quant.conv``."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import why
from x86quant.lowering.passes._epilogue import Lowered, lower
from x86quant.lowering.passes._weights import quantized_operands

_NAMES = (
    "stride", "padding", "dilation", "transposed", "output_padding", "groups",
)  # fmt: skip


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of convolutions lowered."""
    return lower(gm, torch.ops.aten.convolution.default, rule)


def rule(gm: GraphModule, node: Node) -> Lowered:
    """The convolution of ours that computes what ``node`` does, if its operands are quantized."""
    settings: dict[str, Any] = dict(zip(_NAMES, node.args[3:], strict=True))
    operands = quantized_operands(gm, node, settings["groups"] if settings["transposed"] else 1)
    if operands is None:
        return None
    shape = node.meta.get("shape")
    if shape is not None and len(shape) != len(settings["stride"]) + 2:
        why(node, "its input has no batch dimension")
        return None
    return "conv", {**operands, **settings}
