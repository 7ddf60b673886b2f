"""Attention that is spelled out becomes ``scaled_dot_product_attention``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish
from x86quant.lowering.row_passes._values import (
    argument,
    call,
    is_alone,
    is_float32,
    same_sizes,
    sizes,
    value_of,
)

aten = torch.ops.aten

#: Of batches of heads of tokens.
_RANK = 4
#: With heads and batches in one, or with windows, too.
_RANKS = (_RANK - 1, _RANK, _RANK + 1)
_RESHAPES = (aten.reshape.default, aten.view.default)


def spell_einsums(gm: GraphModule) -> int:
    """An ``einsum`` that multiplies matrices becomes ``matmul``, as attention is known by.

    Returns the number of einsums.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.einsum.default or len(node.args) != 2 or node.kwargs:
            continue
        equation, operands = node.args
        turned = _second_is_turned(str(equation))
        a, b = operands if len(operands) == 2 else (None, None)
        if turned is None or not is_float32(node, a, b):
            continue
        of_b = value_of(b)
        assert of_b is not None
        with gm.graph.inserting_before(node):
            if turned:
                right: Any = call(
                    gm.graph, aten.transpose.int, of_b.transpose(-1, -2), b, of_b.dim() - 2,
                    of_b.dim() - 1,
                )  # fmt: skip
            else:
                right = b
            product = call(gm.graph, aten.matmul.default, value_of(node), a, right)
        product.meta = {**node.meta}
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _second_is_turned(equation: str) -> bool | None:
    """Of an equation of matrices, whether the second is transposed; None if it is another one."""
    given, _, out = equation.replace(" ", "").partition("->")
    a, comma, b = given.partition(",")
    names = f"{a}{b}{out}"
    if not comma or not names.isalpha() or min(map(len, (a, b, out))) < 3:
        return None
    if any(len(set(part)) != len(part) for part in (a, b, out)) or a[:-2] != b[:-2]:
        return None
    row, inner, first, second = a[-2], a[-1], b[-2], b[-1]
    if row in b or out[:-2] != a[:-2]:
        return None
    if second == inner and out[-2:] == row + first:
        return True
    return False if first == inner and out[-2:] == row + second else None


@dataclasses.dataclass(frozen=True)
class _Attention:
    """What is spelled out.

    Attributes:
        heads: queries, keys and values.
        scale: of the product of queries and keys.
        steps: what is done to the product before the softmax: the nodes that reshape it, and what
            is added to it.
    """

    heads: tuple[Node, Node, Node]
    scale: float
    steps: tuple[tuple[str, Node], ...]


def recognise_eager_attention(gm: GraphModule) -> int:
    """``softmax(q @ k.T * scale + mask) @ v`` becomes ``scaled_dot_product_attention``.

    Several masks may be added, to the product in other shapes: a row and a column of positions, or
    windows that do not see each other.

    Returns the number of attentions recognised.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.matmul.default:
            continue
        found = _eager_attention(node)
        if found is None:
            continue
        value = value_of(node)
        assert value is not None
        with gm.graph.inserting_before(node):
            mask = _mask(gm, found.steps)
            if not _fits(mask, value.dim()):
                continue
            given = [*found.heads, mask] if isinstance(mask, Node) else found.heads
            q, k, v, *masks = (_as_batches(gm, x, value.dim()) for x in given)
            whole = call(
                gm.graph, aten.scaled_dot_product_attention.default, value_of(q), q, k, v,
                masks[0] if masks else None, scale=found.scale,
            )  # fmt: skip
            if value.dim() > _RANK:
                whole = call(
                    gm.graph, aten.reshape.default, value, whole, [-1, *map(int, value.shape[1:])]
                )
            elif value.dim() < _RANK:
                whole = call(gm.graph, aten.squeeze.dim, value, whole, 1)
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _as_batches(gm: GraphModule, x: Node, rank: int) -> Node:
    """``x`` [B, G, H, tokens, D] as [B G, H, tokens, D], or [B, tokens, D] as [B, 1, tokens, D].

    ``rank`` is that of queries: masks that are the same for all batches may have a lower one.
    """
    value = value_of(x)
    assert value is not None
    if rank < _RANK and value.dim() == rank:
        return call(gm.graph, aten.unsqueeze.default, value.unsqueeze(1), x, 1)
    if value.dim() <= _RANK:
        return x
    kept = [int(size) for size in value.shape[-3:]]
    return call(gm.graph, aten.reshape.default, value.flatten(0, 1), x, [-1, *kept])


def _mask(gm: GraphModule, steps: tuple[tuple[str, Node], ...]) -> Node | bool | None:
    """What ``steps`` add to the product; None if that is nothing, False if it cannot be said."""
    mask: Node | None = None
    if any(kind == "view" for kind, _ in steps):  # of sums that lie otherwise it would be a copy
        steps = tuple(
            (kind, call(gm.graph, aten.contiguous.default, _laid_out(node), node))
            if kind == "add"
            else (kind, node)
            for kind, node in steps
        )
    for kind, node in steps:
        if kind == "add":
            if mask is None:
                mask = node
                continue
            one, other = value_of(mask), value_of(node)
            assert one is not None
            assert other is not None
            mask = call(gm.graph, aten.add.Tensor, one + other, mask, node)
        elif mask is not None:
            wide = _expanded(gm, mask, node.args[0])
            if wide is None:
                return False
            mask = call(gm.graph, aten.reshape.default, value_of(node), wide, node.args[1])
    return mask


def _laid_out(node: Node) -> torch.Tensor:
    value = value_of(node)
    assert value is not None
    return value.contiguous()


def _expanded(gm: GraphModule, mask: Node, like: Any) -> Node | None:
    """``mask`` in the sizes of ``like``, if those that it lacks are known."""
    value, wanted = value_of(mask), value_of(like)
    assert value is not None
    assert wanted is not None
    if same_sizes(mask, like):
        return mask
    own = [None] * (wanted.dim() - value.dim()) + [str(size) for size in value.shape]
    target = [
        -1 if have == str(want) else want for have, want in zip(own, wanted.shape, strict=True)
    ]
    if not all(type(size) is int for size in target):
        return None
    return call(gm.graph, aten.expand.default, value.expand(target), mask, target)


def _fits(mask: Node | bool | None, rank: int) -> bool:
    """Whether attention takes such a mask, with so many dimensions of its heads."""
    if mask is None:
        return True
    if not isinstance(mask, Node) or not is_float32(mask):
        return False
    return _is_of_all(mask) if rank > _RANK else len(sizes(mask) or ()) <= rank


def _folds(x: object, rank: int) -> bool:
    """Whether ``x`` has ``rank`` dimensions, and those behind the first are known if folded."""
    value = value_of(x)
    if value is None or value.dim() != rank:
        return False
    return rank <= _RANK or all(type(size) is int for size in value.shape[1:])


def _eager_attention(node: Node) -> _Attention | None:
    """The attention that ``node`` ends, if it is one."""
    softmax, v = node.args[:2]
    if not isinstance(softmax, Node) or softmax.target is not aten.softmax.int:
        return None
    rank = len(sizes(softmax) or ())
    if rank not in _RANKS or argument(softmax, 1, "dim") not in (-1, rank - 1):
        return None
    if not is_alone(softmax) or not _folds(node, rank):
        return None
    if argument(softmax, 2, "dtype") not in (None, torch.float32):
        return None
    scores = softmax.args[0]
    if not isinstance(scores, Node) or not is_float32(scores, softmax, v):
        return None
    found = _scores(scores)
    if found is None or not isinstance(v, Node):
        return None
    product, (q, k, scale), steps = found
    # What is reshaped on the way is so again: as heads lie, so do the scores.
    if not all(_folds(x, rank) for x in (q, k, v)) or not same_sizes(product, scores):
        return None
    return _Attention((q, k, v), scale, steps)


_Product = tuple[Node, Node, float]


def _scores(node: Node) -> tuple[Node, _Product, tuple[tuple[str, Node], ...]] | None:
    """The product of queries and keys behind ``node``, and what is done to it on the way."""
    if not is_alone(node):
        return None
    product = _eager_product(node)
    if product is not None:
        return node, product, ()
    candidates: list[tuple[Any, str, Any]] = []
    if node.target in _RESHAPES:
        candidates.append((node.args[0], "view", node))
    elif node.target is aten.add.Tensor and not node.kwargs:
        one, other = node.args[:2]
        pairs = ((one, other), (other, one))
        candidates += [(a, "add", b) for a, b in pairs if same_sizes(a, node) and is_float32(b)]
    for source, kind, step in candidates:
        found = _scores(source) if isinstance(source, Node) else None
        if found is not None and isinstance(step, Node):
            return *found[:2], (*found[2], (kind, step))
    return None


def _is_of_all(mask: Node | None) -> bool:
    """Whether ``mask`` is the same for all batches, however they are counted."""
    found = () if mask is None else sizes(mask) or ()
    return len(found) < _RANK or (len(found) == _RANK and found[0] == "1")


def _eager_product(node: Node) -> _Product | None:
    """Queries, keys and scale of ``q @ k.T * scale``."""
    scale = 1.0
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        source, number = node.args[:2]
        if type(number) not in (int, float) or not number or not isinstance(source, Node):
            return None
        if node.kwargs or not is_alone(source):
            return None
        scale = float(number) if node.target is aten.mul.Tensor else 1 / float(number)  # type: ignore[arg-type]
        node = source
    if node.target is not aten.matmul.default:
        return None
    q, turned = node.args[:2]
    if not isinstance(q, Node) or not isinstance(turned, Node):
        return None
    rank = len(sizes(turned) or ())
    if turned.target is not aten.transpose.int or rank not in _RANKS:
        return None
    if {int(d) % rank for d in turned.args[1:3]} != {rank - 2, rank - 1}:  # type: ignore[arg-type]
        return None
    k = turned.args[0]
    if not isinstance(k, Node):
        return None
    q, of_q = _without_number(q)
    k, of_k = _without_number(k)
    return q, k, scale * of_q * of_k


def _without_number(x: Node) -> tuple[Node, float]:
    """What ``x`` is a multiple of by a number, and the number."""
    if x.target is aten.mul.Tensor and is_alone(x) and not x.kwargs and is_float32(x):
        source, number = x.args
        if type(number) in (int, float) and isinstance(source, Node) and same_sizes(source, x):
            return source, float(number)  # type: ignore[arg-type]
    return x, 1.0
