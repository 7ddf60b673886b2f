"""Copies, dropout in evaluation, whole slices, views and padding that change nothing go."""

from __future__ import annotations

import sys

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish
from x86quant.lowering.row_passes._values import argument, same_sizes, value_of

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_STRIDED = frozenset({aten.as_strided.default, aten.as_strided_copy.default})


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of nodes dropped."""
    if any(node.target in _STRIDED for node in gm.graph.nodes):
        return 0  # they see how memory lies, which copies decide
    changed = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)
            changed += 1
            continue
        if node.target in _VIEWS:
            node.target = aten.reshape.default  # a view may not be one of a value not copied
        source = _same_as(node)
        if source is None or _is_returned(node):
            continue
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, max(changed, 1)) and changed


def _same_as(node: Node) -> Node | None:
    """The value that ``node`` merely repeats."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is aten.clone.default:
        return source
    if node.target is aten.dropout.default:
        return source if argument(node, 2, "train") is False else None
    if node.target is aten.slice.Tensor:
        start, end, step = (
            argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
        )  # fmt: skip
        whole = start in (0, None) and step == 1 and (end is None or end == sys.maxsize)
        return source if whole else None
    if node.target is aten.pad.default:
        return source if all(type(n) is int and n == 0 for n in node.args[1]) else None  # type: ignore[union-attr]
    if node.target is aten.reshape.default:
        return source if same_sizes(node, source) else None
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        rank = 0 if (value := value_of(node)) is None else value.dim()
        dims = [{int(d) % rank for d in n.args[1:3]} for n in (node, source)] if rank else [0, 1]  # type: ignore[arg-type]
        inner = source.args[0]
        return inner if dims[0] == dims[1] and isinstance(inner, Node) else None
    return None


def _is_returned(node: Node) -> bool:
    """Whether the graph returns ``node``, which must not be another's memory."""
    return any(user.op == "output" for user in node.users)
