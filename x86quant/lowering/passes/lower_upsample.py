"""``F.interpolate`` of a quantized tensor becomes ``x86quant.upsample``."""

from __future__ import annotations

import operator

import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import dequantized, scale_and_zp, why
from x86quant.lowering.passes._epilogue import Lowered, lower
from x86quant.lowering.views import computes_a_size, is_size_tuple


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of upsamplings lowered."""
    return lower(gm, F.interpolate, _rule, clamps=False)


def _rule(gm: GraphModule, node: Node) -> Lowered:
    if len(node.args) != 5:
        why(node, "antialiased or recomputed scale factors")
        return None
    x, size, factor, mode, align_corners = node.args
    codes = dequantized(x)
    if codes is None or "shape" not in codes.meta:
        why(node, "its input is not quantized")
        return None
    spatial = len(codes.meta["shape"]) - 2
    if isinstance(size, Node):
        if is_size_tuple(size):
            size = [gm.graph.call_function(operator.getitem, (size, i)) for i in range(spatial)]
        elif not computes_a_size(size):
            why(node, "its size is computed in a way that is not known")
            return None
    return "upsample", {
        "x": codes,
        "size": [size] * spatial if isinstance(size, (int, Node)) else size,
        "scale_factor": [float(factor)] * spatial if isinstance(factor, (int, float)) else factor,
        "mode": mode,
        "align_corners": align_corners,
        **scale_and_zp("x", codes),
    }
