"""Masks of attention are made simpler."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant, finish, replace
from x86quant.lowering.row_passes._values import (
    argument,
    call,
    is_alone,
    is_float32,
    same_sizes,
    size_node,
    size_of_input,
    sizes,
    value_of,
)

aten = torch.ops.aten


_BOTH = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)


class _Numbers(NamedTuple):
    """What is known of a tensor of the numbers 0, 1, 2, … along one dimension.

    Attributes:
        dim: that dimension; all others have size 1.
        size: how many there are, as the graph says it.
    """

    dim: int
    size: Any


_Known = dict[Any, _Numbers]


def simplify_masks(gm: GraphModule) -> int:
    """What transformers asks of a mask and always knows is left out.

    It builds masks from functions of numbers of tokens: ``q_idx >= 0`` holds of each, and
    ``padding[batch_idx, kv_idx]`` of all numbers in order is the padding mask itself, seen in four
    dimensions. Attention that sees everything needs no mask.

    Returns the number of calls left out.
    """
    numbers: _Known = {}
    true: set[Any] = set()
    changed = 0
    for node in list(gm.graph.nodes):
        found = _numbers(node, numbers)
        if found is not None:
            numbers[node] = found
        elif _is_true(gm, node, numbers, true):
            true.add(node)
        else:
            changed += (
                _without_true(node, true)
                or _without_mask(node, true)
                or _without_index(node, numbers)
            )
    return finish(gm, changed)


def _numbers(node: Node, known: _Known) -> _Numbers | None:
    args, value = node.args, value_of(node)
    if value is None or value.dtype not in (torch.int64, torch.int32):
        return None
    if node.target is aten.arange.default:
        return _Numbers(0, args[0])
    if not args or args[0] not in known:
        return None
    dim, size = known[args[0]]
    if node.target is aten.add.Tensor and type(args[1]) is int and args[1] == 0:
        return _Numbers(dim, size)
    if node.target is aten.unsqueeze.default and isinstance(args[1], int):
        at = args[1] % value.dim()
        return _Numbers(dim + (at <= dim), size)
    return None


def _is_true(gm: GraphModule, node: Node, numbers: _Known, true: set[Any]) -> bool:
    """Whether every element of ``node`` is true, whatever its sizes."""
    value, args = value_of(node), node.args
    if value is None or value.dtype is not torch.bool:
        return False
    if node.op == "get_attr":
        known = constant(gm, node)
        return known is not None and bool(known.all())
    if node.target is aten.ge.Scalar:
        return args[0] in numbers and isinstance(args[1], int | float) and args[1] <= 0
    if node.target in _BOTH:
        return args[0] in true and args[1] in true
    return node.target in (aten.expand.default, aten.unsqueeze.default) and args[0] in true


def _without_true(node: Node, true: set[Any]) -> bool:
    """Whether ``node`` was an "and" of a mask and of what is true, and is now the mask."""
    if node.target not in _BOTH or not any(x in true for x in node.args):
        return False
    mask, other = node.args if node.args[1] in true else node.args[::-1]
    value, seen, wanted = value_of(mask), sizes(mask), sizes(node)
    if value is None or value.dtype is not torch.bool or seen is None or wanted is None:
        return False
    assert isinstance(mask, Node)
    assert isinstance(other, Node)
    if seen != wanted and not _is_expanded(node, seen, wanted):
        if len(sizes(other) or ()) != len(wanted) or len(seen) != len(wanted):
            return False
        with node.graph.inserting_before(node):
            mask = _expanded(mask, seen, other, node)
    replace(node, mask)
    return True


def _without_mask(node: Node, true: set[Any]) -> bool:
    """Whether ``node`` was attention by a mask that hides nothing, and now has none."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    if argument(node, 3, "attn_mask") not in true:
        return False
    if len(node.args) > 3:
        node.update_arg(3, None)
    else:
        node.update_kwarg("attn_mask", None)
    return True


def _is_expanded(node: Node, seen: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether whoever reads ``node`` makes it as large by itself."""
    if len(seen) != len(wanted):
        return False
    changed = [dim for dim, (a, b) in enumerate(zip(seen, wanted, strict=True)) if a != b]
    changed = [dim - len(wanted) for dim in changed]  # more dimensions come first
    return all(
        user.target is aten.expand.default and all(user.args[1][dim] != -1 for dim in changed)  # type: ignore[index]
        for user in node.users
    )


def _expanded(mask: Node, seen: tuple[str, ...], other: Node, node: Node) -> Node:
    """``mask`` in the sizes of ``node``: where it has others, they are those of ``other``."""
    shape: list[Any] = []
    for dim, (have, want) in enumerate(zip(seen, sizes(node) or (), strict=True)):
        size: Any = -1
        if have != want:
            size = size_node(other, dim, value_of(node).shape[dim])  # type: ignore[union-attr]
        shape.append(size)
    return call(node.graph, aten.expand.default, value_of(node), mask, shape)


def _without_index(node: Node, numbers: _Known) -> bool:
    """Whether ``node`` took elements of a tensor in their order, and now looks at it.

    There may be more elements than are taken; where there are fewer, the view is refused.
    """
    if node.target is not aten.index.Tensor:
        return False
    source, indices = node.args[:2]
    assert isinstance(indices, list | tuple)
    seen, wanted = sizes(source), sizes(node)
    if seen is None or wanted is None or len(indices) != len(seen):
        return False
    if not all(index in numbers for index in indices):
        return False
    shape: list[Any] = [1] * len(wanted)
    dims = [numbers[index].dim - len(sizes(index) or ()) for index in indices]
    if dims != sorted(set(dims)):
        return False
    for index, dim in zip(indices, dims, strict=True):
        shape[dim] = numbers[index].size
    graph, value = node.graph, value_of(node)
    with graph.inserting_before(node):
        view = source
        for dim, index in enumerate(indices):
            if seen[dim] != (sizes(index) or ())[dims[dim]]:
                first = _narrowed(view, dim, index, dims[dim])
                view = call(graph, aten.slice.Tensor, first, view, dim, 0, numbers[index].size)
        view = call(graph, aten.reshape.default, value, view, shape)
    replace(node, view)
    return True


def _narrowed(node: Any, dim: int, index: Any, at: int) -> torch.Tensor:
    """What stands for as many elements of ``node`` along ``dim`` as ``index`` has along ``at``."""
    value, size = node.meta["val"], index.meta["val"].shape[at]
    narrowed: torch.Tensor = value.new_empty([*value.shape[:dim], size, *value.shape[dim + 1 :]])
    return narrowed


def merge_masks(gm: GraphModule) -> int:
    """Two masks that are added to the scores of an attention one after the other become one.

    Shifted windows add the positions' bias [1, heads, N, N], then, seen as [images, windows, heads,
    N, N], what hides tokens of other windows [1, windows, 1, N, N]: both are known.

    Returns the number of masks merged.
    """
    changed = 0
    for back in list(gm.graph.nodes):
        found = _masks(gm, back)
        if found is None:
            continue
        scores, bias, windows, apart = found
        whole = value_of(back)
        with gm.graph.inserting_before(back):
            both = constant(gm, bias) + constant(gm, windows)  # type: ignore[operator]
            mask = add_constant(gm, gm.graph, "window_masks", both)
            mask.meta["val"] = torch.empty_like(both, device="meta")
            shape = _whole_shape(apart, scores)
            repeated = call(gm.graph, aten.expand.default, value_of(apart), mask, shape)
            mask = call(gm.graph, aten.reshape.default, whole, repeated, back.args[1])
            total = call(gm.graph, aten.add.Tensor, whole, scores, mask)
        back.replace_all_uses_with(total)
        gm.graph.erase_node(back)
        changed += 1
    return finish(gm, changed)


def _whole_shape(apart: Node, scores: Node) -> list[Any]:
    """The sizes of ``apart``, of which its view may leave one out: that of the images at most."""
    shape = list(apart.args[1])  # type: ignore[arg-type]
    known = value_of(apart).shape  # type: ignore[union-attr]
    for dim, size in enumerate(shape):
        if type(size) is int and size == -1:
            shape[dim] = known[dim] if type(known[dim]) is int else None
    if None in shape:
        shape[shape.index(None)] = _images(apart, scores)
    return shape


def _images(apart: Node, scores: Node) -> Node:
    """How many images there are, by what is not a part of the attention, if that says it."""
    graph = apart.graph
    shape = value_of(apart).shape  # type: ignore[union-attr]
    if (found := size_of_input(graph, shape[0])) is not None:
        return found
    rows = size_node(scores, 0, value_of(scores).shape[0])  # type: ignore[union-attr]
    images = graph.call_function(operator.floordiv, (rows, shape[1]))
    images.meta["val"] = shape[0]
    return images


def _masks(gm: GraphModule, back: Node) -> tuple[Node, Node, Node, Node] | None:
    """Scores, bias, windows' mask and the scores as they meet that; ``back`` undoes the view."""
    if back.target is not aten.reshape.default:
        return None
    outer = back.args[0]
    if not isinstance(outer, Node) or outer.target is not aten.add.Tensor or outer.kwargs:
        return None
    apart, windows = outer.args
    if not isinstance(apart, Node) or not isinstance(windows, Node):
        return None
    if apart.target is not aten.reshape.default or not (is_alone(apart) and is_alone(outer)):
        return None
    inner = apart.args[0]
    if not isinstance(inner, Node) or inner.target is not aten.add.Tensor or inner.kwargs:
        return None
    scores, bias = inner.args
    if not isinstance(scores, Node) or not isinstance(bias, Node) or not is_alone(inner):
        return None
    if not is_float32(scores, bias, windows, back):
        return None
    if not (same_sizes(scores, inner) and same_sizes(inner, back) and same_sizes(apart, outer)):
        return None
    if constant(gm, bias) is None or constant(gm, windows) is None:
        return None
    seen, added = value_of(apart), value_of(windows)
    if seen is None or added is None or seen.dim() != 5 or added.dim() != 5:
        return None
    if (
        added.shape[0] != 1
        or added.shape[2] != 1
        or not all(type(n) is int for n in seen.shape[1:])
    ):
        return None
    return scores, bias, windows, apart
