"""An activation right behind a linear on float tensors moves into it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish, nodes_of, replace, set_kwargs, sole_user

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of activations fused."""
    changed = 0
    for linear in nodes_of(gm, "linear_dynamic", "linear_real", "linear_weight_only"):
        user = sole_user(linear)
        activation = None if user is None else activation_of(user)
        if user is None or activation is None or linear.kwargs["activation"] is not None:
            continue
        set_kwargs(linear, activation=activation)
        linear.meta["source"] = user.meta.get("source", "")
        replace(user, linear)
        changed += 1
    return finish(gm, changed)


_PLAIN: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.tanh.default: "tanh",
}


def activation_of(node: Node) -> str | None:
    """The name under which a linear knows what ``node`` computes of its first argument."""
    bounds: tuple[Any, ...] = (*node.args[1:], *node.kwargs.values())
    if node.target is aten.clamp.default and bounds in ((0,), (0, None)):
        return "relu"
    if node.target is aten.gelu.default:
        spelling = str(node.kwargs.get("approximate", (*node.args[1:], "none")[0]))
        return {"none": "gelu", "tanh": "gelu_tanh"}[spelling]
    return _PLAIN.get(node.target)
