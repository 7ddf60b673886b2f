"""The sum of a quantized tensor and a layer's float result becomes that layer with a residual.

PT2E does not quantize what stands between the two. Nor does the layer with its sum in the epilogue,
so that nothing is rounded that was not rounded before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import dequantized, scale_and_zp
from x86quant.lowering.passes import lower_convolution, lower_linear
from x86quant.lowering.passes._epilogue import Lowered, Rule, lower

aten = torch.ops.aten

_LAYERS: dict[Any, Rule] = {
    aten.convolution.default: lower_convolution.rule,
    aten.linear.default: lower_linear.rule,
}


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of sums lowered."""
    return lower(gm, aten.add.Tensor, _rule)


def _rule(gm: GraphModule, node: Node) -> Lowered:
    for layer, other in (node.args[:2], node.args[1::-1]):
        codes = dequantized(other)
        if not isinstance(layer, Node) or codes is None or len(layer.users) > 1:
            continue
        rule = _LAYERS.get(layer.target)
        shapes = {x.meta.get("shape") for x in (layer, codes, node)}
        if rule is None or len(shapes) > 1 or None in shapes:
            continue
        found = rule(gm, layer)
        if found is not None:
            name, settings = found
            node.meta["layer"] = layer.meta.get("layer", node.meta.get("layer"))
            return name, {**settings, "residual": codes, **scale_and_zp("residual", codes)}
    return None
