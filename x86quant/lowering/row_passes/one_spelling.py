"""One spelling of what torch has several for.

torch would spell these alike itself where it traces an exported graph once more, to take writes
in place out of it. That takes longer than the export, and few graphs have any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish
from x86quant.lowering.row_passes._values import argument, size_node, size_of_input, value_of

aten = torch.ops.aten


def spell_alike(gm: GraphModule) -> int:
    """Views are reshapes, chunks splits, casts name a type, what keeps all values is a copy.

    Returns the number of nodes spelled.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        spell = _SPELLING.get(node.target)
        changed += spell is not None and spell(gm, node)
    return finish(gm, changed)


def _view(_: GraphModule, node: Node) -> bool:
    node.target = aten.reshape.default  # a view may not be one of a value not copied
    return True


def _flatten(gm: GraphModule, node: Node) -> bool:
    first, last = argument(node, 1, "start_dim", 0), argument(node, 2, "end_dim", -1)
    return _reshape(gm, node, first, last, [-1])


def _unflatten(gm: GraphModule, node: Node) -> bool:
    dim = argument(node, 1, "dim")
    return _reshape(gm, node, dim, dim, argument(node, 2, "sizes"))


def _reshape(gm: GraphModule, node: Node, first: int, last: int, parts: Sequence[Any]) -> bool:
    """Let ``node`` give ``parts`` to the dimensions from ``first`` to ``last``, and keep others."""
    source = value_of(node.args[0])
    if source is None or source.dim() == 0:
        return False
    first, last = first % source.dim(), last % source.dim()
    others = [dim for dim in range(source.dim()) if not first <= dim <= last]
    with gm.graph.inserting_before(node):
        kept = [_size(gm, node.args[0], dim) for dim in others]
    node.target, node.kwargs = aten.reshape.default, {}
    node.args = (node.args[0], [*kept[:first], *parts, *kept[first:]])
    return True


def _size(gm: GraphModule, node: Any, dim: int) -> Any:
    """A size of ``node``, by an input where one has it, too."""
    size = node.meta["val"].shape[dim]
    if type(size) is int:
        return size
    return size_of_input(gm.graph, size) or size_node(node, dim, size)


def _chunk(_: GraphModule, node: Node) -> bool:
    source, parts, dim = value_of(node.args[0]), node.args[1], argument(node, 2, "dim", 0)
    size = None if source is None else source.shape[dim]
    if type(size) is not int or type(parts) is not int or size < 1:
        return False  # parts of a free size are as they were
    node.target, node.kwargs = aten.split.Tensor, {}
    node.args = (node.args[0], -(-size // parts), dim)
    return True


def _cast(_: GraphModule, node: Node) -> bool:
    before, after = value_of(node.args[0]), value_of(node)
    if before is None or after is None:
        return False
    if before.dtype == after.dtype:
        return _copy(node)
    node.target, node.args = aten._to_copy.default, node.args[:1]
    node.kwargs = {"dtype": after.dtype}
    return True


def _contiguous(_: GraphModule, node: Node) -> bool:
    plain = len(node.args) == 1 and not node.kwargs
    return plain and _copy(node, memory_format=torch.contiguous_format)


def _dropout(_: GraphModule, node: Node) -> bool:
    return argument(node, 2, "train") is False and _copy(node)


def _constant(_: GraphModule, node: Node) -> bool:
    return _copy(node)  # made in the code, whose gradients are nobody's


def _copy(node: Node, **how: Any) -> bool:
    node.target, node.args, node.kwargs = aten.clone.default, node.args[:1], how
    return True


_SPELLING: dict[Any, Callable[[GraphModule, Node], bool]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.flatten.using_ints: _flatten,
    aten.unflatten.int: _unflatten,
    aten.chunk.default: _chunk,
    aten.to.dtype: _cast,
    aten.to.device: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.other: _cast,
    aten.contiguous.default: _contiguous,
    aten.dropout.default: _dropout,
    aten.lift_fresh_copy.default: _constant,
    aten.detach_.default: _constant,
}
#: What torch makes of each is what is made of it here.
SPELLED = frozenset({*_SPELLING, aten.reshape.default})
