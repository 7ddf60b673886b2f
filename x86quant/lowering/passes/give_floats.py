"""A linear or convolution of codes whose result is not quantized multiplies in int8 all the same.

So it is behind what reads floats: activations that come before the next range, sums in float, the
end of a model. An activation right behind it is computed with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import constant, finish, replace, sole_user, why
from x86quant.lowering.passes import lower_convolution, lower_linear
from x86quant.lowering.passes._real_products import real_pixels, real_product, window_of
from x86quant.lowering.passes.fuse_activation import activation_of

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of products."""
    changed = 0
    for target, rule in (
        (aten.linear.default, lower_linear.rule),
        (aten.convolution.default, lower_convolution.rule),
    ):
        for node in list(gm.graph.find_nodes(op="call_function", target=target)):
            with gm.graph.inserting_before(node):
                lowered = rule(gm, node)
            if lowered is not None and _fits(gm, node, lowered[1]):
                _replace(gm, node, lowered[1])
                changed += 1
    return finish(gm, changed)


def _fits(gm: GraphModule, node: Node, operands: dict[str, Any]) -> bool:
    bias, scales = constant(gm, operands["bias"]), constant(gm, operands["weight_scales"])
    reason = None
    if operands.get("transposed"):
        reason = "a transposed convolution that gives floats has no int8 form"
    elif operands.get("groups", 1) != 1:
        reason = "a convolution with groups that gives floats has no int8 form"
    elif bias is not None and bias.dtype != torch.float32:
        reason = f"its bias is {bias.dtype}"
    elif scales is None or not bool((scales > 0).all()):
        reason = "its weight has scales that are not positive"
    if reason is not None:
        why(node, reason)
    return reason is None


def _replace(gm: GraphModule, node: Node, operands: dict[str, Any]) -> None:
    user = sole_user(node)
    activation = None if user is None else activation_of(user)
    if node.target is aten.linear.default:
        floats = real_product(gm, node, operands, activation)
    else:
        floats = real_pixels(gm, node, operands, activation, window_of(gm, operands))
    if user is not None and activation is not None:
        floats.meta["source"] = user.meta.get("source", "")
        replace(user, floats)
        gm.graph.erase_node(node)
    else:
        replace(node, floats)
