"""Layer norm over the last dimension becomes ``x86quant.layer_norm``."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import dequantized, scale_and_zp, why
from x86quant.lowering.passes._epilogue import Lowered, lower


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of layer norms lowered."""
    return lower(gm, torch.ops.aten.layer_norm.default, _rule, clamps=False)


def _rule(gm: GraphModule, node: Node) -> Lowered:
    x, normalized_shape, weight, bias, eps = node.args
    codes = dequantized(x)
    if codes is None or "shape" not in codes.meta:
        why(node, "its input is not quantized")
        return None
    if len(normalized_shape) != 1:  # type: ignore[arg-type]
        why(node, "it normalizes over more than one dimension")
        return None
    return "layer_norm", {
        "x": codes,
        "axis": len(codes.meta["shape"]) - 1,
        "weight": weight,
        "bias": bias,
        "eps": eps,
        **scale_and_zp("x", codes),
    }
