"""Rows of native code are joined by an op of ours, so that native code goes on with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import emit, finish, is_op
from x86quant.lowering.row_passes._values import argument, is_float32, item_of, value_of
from x86quant.lowering.views import is_view

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of concatenations."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.cat.default:
            continue
        value, xs, dim = value_of(node), list(node.args[0]), argument(node, 1, "dim", 0)
        if value is None or not value.dim() or len(xs) < 2 or not is_float32(node, *xs):
            continue
        if not all(_is_native(x) for x in xs) or not any(map(is_op, _readers(node))):
            continue
        with gm.graph.inserting_before(node):
            joined = emit(gm.graph, "join", node, xs=xs, dim=dim % value.dim())
        joined.meta["val"] = value
        node.replace_all_uses_with(joined)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _is_native(x: Any) -> bool:
    """Whether native code has made what ``x`` is, or looks at."""
    while is_view(x) and isinstance(x.args[0], Node) and not is_op(x.args[0]):
        x = x.args[0]
    return is_op(x) or item_of(x, 0, *_SUMS) is not None or item_of(x, 1, *_SUMS) is not None


#: Ops whose first results are floats: a sum and its norm.
_SUMS = ("linear_rows_norm", "norm_rows")


def _readers(node: Node) -> Iterator[Node]:
    """What reads ``node``, through views too."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user
