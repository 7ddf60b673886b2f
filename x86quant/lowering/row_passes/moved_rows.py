"""Rows that are only moved between two ops of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import emit, finish, is_op, nodes_of, sole_user
from x86quant.lowering.row_passes._values import (
    argument,
    call,
    emit_many,
    is_alone,
    is_float32,
    item_of,
    items,
    quantizer_of,
    value_of,
)
from x86quant.lowering.views import is_roll, is_view
from x86quant.weight_form import features_of

aten = torch.ops.aten


_CODES = ("codes", "scale", "zero_point")
#: The arguments of a move for numbers of one a row, which have no last dimension.
_Numbers = tuple[Any, ...]


def move_rows_as_codes(gm: GraphModule) -> int:
    """Rows that are put in another order between two products are moved as codes, not as floats.

    So windows are made and undone in Swin: a quarter of the bytes, and what stands on either side,
    a norm or the sum with a residual, comes next to the product that it is fused with.

    Returns the number of moves.
    """
    changed = sum(_behind_quantizer(gm, quantizer) for quantizer in nodes_of(gm, "quantize_rows"))
    changed += sum(_before_product(gm, product) for product in nodes_of(gm, "linear_rows"))
    return finish(gm, changed)


def _behind_quantizer(gm: GraphModule, quantizer: Node) -> int:
    """Quantize rows where they lie; codes are moved in place of the floats."""
    moves: list[Node] = []
    base: Any = quantizer.kwargs["x"]
    while isinstance(base, Node) and is_alone(base) and _on_numbers(base) is not None:
        moves.append(base)
        base = base.args[0]
    if not moves or not isinstance(base, Node) or not _is_of_rows(base):
        return 0
    with gm.graph.inserting_before(quantizer):
        made = quantizer_of(base)
        if made is None:
            _, *codes = emit_many(
                gm.graph, "quantize_rows", quantizer, (value_of(base), None, None), x=base
            )
        else:
            found = items(made)
            codes = [found[number] for number in range(3)]
        features = value_of(base)
        assert features is not None
        codes = _moved(gm, codes, moves[::-1], int(features.shape[-1]))
    for number, item in items(quantizer).items():
        item.replace_all_uses_with(codes[number])
        gm.graph.erase_node(item)
    gm.graph.erase_node(quantizer)
    for move in moves:
        gm.graph.erase_node(move)
    return len(moves)


def _before_product(gm: GraphModule, product: Node) -> int:
    """Move the codes that ``product`` reads, in place of the floats that it makes."""
    moves: list[Node] = []
    last = product
    read: Any = product.kwargs["codes"]
    weight = value_of(product.kwargs["weight"])
    if len(read.users) > 1 or weight is None:
        return 0  # products of the same codes become one
    while (user := sole_user(last)) is not None and _on_numbers(user) is not None:
        if not is_alone(last):
            break
        moves.append(user)
        last = user
    if not moves:
        return 0
    arguments = dict(product.kwargs)
    with gm.graph.inserting_before(last):  # sizes that moves take may be computed after the product
        given = [arguments[name] for name in _CODES]
        codes = _moved(gm, given, moves, features_of(weight))
        arguments.update(zip(_CODES, codes, strict=True))
        moved = emit(gm.graph, "linear_rows", product, **arguments)
    moved.meta["val"] = value_of(last)
    last.replace_all_uses_with(moved)
    for node in (*moves[::-1], product):
        gm.graph.erase_node(node)
    return len(moves)


def _is_of_rows(base: Node) -> bool:
    """Whether native code has made ``base``: floats of other ops are moved as they are."""
    source: Any = base.args[0] if base.args else None
    return is_op(base) or (isinstance(source, Node) and is_op(source, "norm_rows"))


def _moved(
    gm: GraphModule, codes: Sequence[Any], moves: Sequence[Node], features: int
) -> list[Node]:
    """Codes of so many features, scales and zero points, moved as ``moves`` do."""
    found = list(codes)
    for move in moves:
        numbers = _on_numbers(move)
        assert numbers is not None
        assert callable(move.target)
        of_codes = (
            ([*numbers[0], features],)
            if move.target is aten.reshape.default
            else tuple(move.args[1:])
        )
        of_each = (of_codes, numbers, numbers)
        found = [
            call(gm.graph, move.target, None, x, *arguments)
            for x, arguments in zip(found, of_each, strict=True)
        ]
        for node in found:
            node.meta = {**move.meta, "val": None}
        found[0].meta["val"] = value_of(move)
    return found


def _on_numbers(move: Node) -> _Numbers | None:
    """The arguments of ``move`` for one number a row; None if it does not move whole rows."""
    find = _MOVES.get(move.target)
    if find is None or move.kwargs or not move.args or not is_float32(move, move.args[0]):
        return None
    before, after = value_of(move.args[0]), value_of(move)
    assert before is not None
    assert after is not None
    if min(before.dim(), after.dim()) < 2 or not _same_rows(before.shape[-1], after.shape[-1]):
        return None
    return find(move, before.dim())


def _same_rows(a: object, b: object) -> bool:
    return type(a) is int and type(b) is int and a == b


def _reshaped(move: Node, _: int) -> _Numbers | None:
    sizes = argument(move, 1, "size")
    return (list(sizes)[:-1],)


def _permuted(move: Node, rank: int) -> _Numbers | None:
    dims = [int(dim) % rank for dim in argument(move, 1, "dims")]
    return (dims[:-1],) if dims[-1] == rank - 1 else None


def _transposed(move: Node, rank: int) -> _Numbers | None:
    dims = [int(dim) % rank for dim in move.args[1:3]]  # type: ignore[arg-type]
    return tuple(dims) if len(dims) == 2 and rank - 1 not in dims else None


def _rolled(move: Node, rank: int) -> _Numbers | None:
    if not is_roll(move):
        return None
    dims: Any = move.args[2]
    named = dims if isinstance(dims, list | tuple) else [dims]
    return tuple(move.args[1:]) if rank - 1 not in named else None


_MOVES: dict[Any, Callable[[Node, int], _Numbers | None]] = {
    aten.permute.default: _permuted,
    aten.reshape.default: _reshaped,
    aten.roll.default: _rolled,
    aten.transpose.int: _transposed,
}


def join_rows(gm: GraphModule) -> int:
    """Rows of native code are joined by an op of ours, so that native code goes on with them.

    Returns the number of concatenations.
    """
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
