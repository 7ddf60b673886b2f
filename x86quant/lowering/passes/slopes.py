"""Activations that scale what is below zero become a part of the layer in front of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant
from x86quant.lowering.passes._epilogue import Lowered, lower
from x86quant.lowering.passes.residuals import LAYERS, residual_rule

aten = torch.ops.aten

_LAYERS = {**LAYERS, aten.add.Tensor: residual_rule}


def lower_sloped(gm: GraphModule) -> int:
    """PReLU and leaky ReLU of a layer's float result, or of its sum, become that layer with slopes.

    Nothing is rounded between the two, as nothing was before.

    Returns the number of activations lowered.
    """
    targets = (aten.prelu.default, aten.leaky_relu.default)
    return sum(lower(gm, target, _rule) for target in targets)


def _rule(gm: GraphModule, node: Node) -> Lowered:
    layer: Any = node.args[0]
    rule = _LAYERS.get(getattr(layer, "target", None))
    if rule is None or len(layer.users) > 1:
        return None
    found = rule(gm, layer)
    if found is None:
        return None
    name, settings = found
    slopes = _slopes(gm, node, name, settings)
    if slopes is None:
        return None
    if "layer" in layer.meta:
        node.meta["layer"] = layer.meta["layer"]
    return name, {**settings, "slopes": add_constant(gm, gm.graph, f"{node.name}_slopes", slopes)}


def _slopes(
    gm: GraphModule, node: Node, name: str, settings: dict[str, Any]
) -> torch.Tensor | None:
    """What ``node`` scales the channels of a layer by; None if it scales another dimension."""
    argument = node.args[1]
    slopes = constant(gm, argument)
    if slopes is None and isinstance(argument, int | float):
        slopes = torch.tensor([argument], dtype=torch.float32)
    if slopes is None:
        return None
    slopes = slopes.float()
    scales = constant(gm, settings["weight_scales"])
    assert scales is not None
    if slopes.numel() == 1:
        return slopes.reshape(1).expand(scales.numel()).contiguous()
    rank = len(node.meta.get("shape", ()))
    is_by_channel = slopes.numel() == scales.numel() and (name == "conv" or rank == 2)
    return slopes.reshape(-1) if is_by_channel else None
