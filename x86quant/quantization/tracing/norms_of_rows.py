"""Batch norms over the rows of a sequence that a linear gave, folded into the linear.

``norm(y.flatten(0, 1)).reshape_as(y)`` is how a norm that takes [rows, features] is put behind a
linear of [batch, tokens, features] (LeViT's layers are such).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_linear_bn_eval

from x86quant.lowering.graph_tools import plain_name
from x86quant.quantization.tracing.seen_values import seen_values

_SEQUENCES = 3  # dimensions


def fold_norms_of_rows(gm: GraphModule, inputs: Callable[[], Sequence[torch.Tensor]]) -> int:
    """Fold such norms, as ``gm`` meets them on ``inputs``; returns how many. Not yet recompiled."""
    found = [pair for node in gm.graph.nodes if (pair := _rows_and_norm(gm, node)) is not None]
    if not found:
        return 0
    seen = seen_values(gm, inputs(), [rows.args[0] for rows, _ in found])
    folded = 0
    for rows, norm in found:
        linear = rows.args[0]
        if not isinstance(linear, Node) or seen[linear].dim() != _SEQUENCES:
            continue
        layer: Any = gm.get_submodule(str(linear.target))
        of_rows: Any = gm.get_submodule(str(norm.target))
        gm.set_submodule(str(linear.target), fuse_linear_bn_eval(layer, of_rows))
        norm.replace_all_uses_with(rows)
        gm.graph.erase_node(norm)
        for user in list(rows.users):
            if plain_name(user) == "reshape_as" and user.args[1] is linear:
                user.replace_all_uses_with(linear)
                gm.graph.erase_node(user)
        folded += 1
    gm.graph.eliminate_dead_code()
    gm.delete_all_unused_submodules()
    return folded


def _rows_and_norm(gm: GraphModule, node: Node) -> tuple[Node, Node] | None:
    """What makes rows of a linear's result, and the norm ``node`` that alone reads these."""
    rows = node.args[0] if node.op == "call_module" and len(node.args) == 1 else None
    if not isinstance(rows, Node) or len(rows.users) != 1 or rows.target is not torch.flatten:
        return None
    linear = rows.args[0]
    if rows.args[1:] != (0, 1) or rows.kwargs or not isinstance(linear, Node):
        return None
    if linear.op != "call_module" or any(
        user is not rows and not _is_asked(user, linear) for user in linear.users
    ):
        return None
    layer, norm = (gm.get_submodule(str(one.target)) for one in (linear, node))
    if type(layer) is not nn.Linear or type(norm) is not nn.BatchNorm1d:
        return None
    called = [n for n in gm.graph.nodes if n.op == "call_module" and n.target == linear.target]
    if len(called) > 1 or norm.running_mean is None or norm.num_features != layer.out_features:
        return None
    return rows, node


def _is_asked(user: Node, linear: Node) -> bool:
    """Whether ``user`` asks for the sizes of ``linear`` alone."""
    name = plain_name(user)
    if name == "reshape_as":
        return user.args[0] is not linear
    return name in ("size", "dim") or (user.target is getattr and user.args[1] == "shape")
