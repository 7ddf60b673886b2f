"""``softmax(q @ k.T * scale + mask) @ v`` becomes ``scaled_dot_product_attention``."""

from __future__ import annotations

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


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of attentions recognised."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.matmul.default:
            continue
        found = _attention(node)
        if found is None:
            continue
        *heads, mask, scale = found
        value = value_of(node)
        assert value is not None
        with gm.graph.inserting_before(node):
            q, k, v = (_as_batches(gm, x) for x in heads)
            whole = call(
                gm.graph, aten.scaled_dot_product_attention.default, value_of(q), q, k, v, mask,
                scale=scale,
            )  # fmt: skip
            if value.dim() > _RANK:
                whole = call(
                    gm.graph, aten.reshape.default, value, whole, [-1, *map(int, value.shape[1:])]
                )
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


#: Of batches of heads of tokens.
_RANK = 4


def _as_batches(gm: GraphModule, x: Node) -> Node:
    """``x`` [B, G, H, tokens, D] as [B G, H, tokens, D]."""
    value = value_of(x)
    assert value is not None
    if value.dim() == _RANK:
        return x
    kept = [int(size) for size in value.shape[-3:]]
    return call(gm.graph, aten.reshape.default, value.flatten(0, 1), x, [-1, *kept])


def _folds(x: object, rank: int) -> bool:
    """Whether ``x`` has ``rank`` dimensions, and those behind the first are known if folded."""
    value = value_of(x)
    if value is None or value.dim() != rank:
        return False
    return rank == _RANK or all(type(size) is int for size in value.shape[1:])


def _attention(node: Node) -> tuple[Node, Node, Node, Node | None, float] | None:
    """Queries, keys, values, an additive mask and the scale of what ``node`` computes."""
    softmax, v = node.args[:2]
    if not isinstance(softmax, Node) or softmax.target is not aten.softmax.int:
        return None
    rank = len(sizes(softmax) or ())
    if rank not in (_RANK, _RANK + 1) or argument(softmax, 1, "dim") not in (-1, rank - 1):
        return None
    if not is_alone(softmax) or not _folds(node, rank):
        return None
    if argument(softmax, 2, "dtype") not in (None, torch.float32):
        return None
    scores = softmax.args[0]
    if not isinstance(scores, Node) or not is_alone(scores) or not is_float32(scores, softmax, v):
        return None
    mask: Node | None = None
    if scores.target is aten.add.Tensor and not scores.kwargs:
        one, other = scores.args[:2]
        for scaled, added in ((one, other), (other, one)):
            if isinstance(scaled, Node) and _product(scaled) and isinstance(added, Node):
                if not same_sizes(scaled, scores) or not is_float32(added) or not is_alone(scaled):
                    return None
                scores, mask = scaled, added
                break
        else:
            return None
    found = _product(scores)
    if found is None or not isinstance(v, Node):
        return None
    q, k, scale = found
    if not all(_folds(x, rank) for x in (q, k, v)) or (rank > _RANK and not _is_of_all(mask)):
        return None
    return q, k, v, mask, scale


def _is_of_all(mask: Node | None) -> bool:
    """Whether ``mask`` is the same for all batches, however they are counted."""
    found = () if mask is None else sizes(mask) or ()
    return len(found) < _RANK or (len(found) == _RANK and found[0] == "1")


def _product(node: Node) -> tuple[Node, Node, float] | None:
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
    if turned.target is not aten.transpose.int or rank not in (_RANK, _RANK + 1):
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
