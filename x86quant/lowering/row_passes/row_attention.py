"""Attention, however it is spelled, becomes one op of ours."""

from __future__ import annotations

import math
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
    quantizer_of,
    same_sizes,
    sizes,
    take_over,
    value_of,
)

aten = torch.ops.aten


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


def recognise_eager_attention(gm: GraphModule) -> int:
    """``softmax(q @ k.T * scale + mask) @ v`` becomes ``scaled_dot_product_attention``.

    Returns the number of attentions recognised.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.matmul.default:
            continue
        found = _eager_attention(node)
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


def _eager_attention(node: Node) -> tuple[Node, Node, Node, Node | None, float] | None:
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
            if isinstance(scaled, Node) and _eager_product(scaled) and isinstance(added, Node):
                if not same_sizes(scaled, scores) or not is_float32(added) or not is_alone(scaled):
                    return None
                scores, mask = scaled, added
                break
        else:
            return None
    found = _eager_product(scores)
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


def _eager_product(node: Node) -> tuple[Node, Node, float] | None:
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


_VIEWS = frozenset({aten.reshape.default, aten.transpose.int, aten.view.default})


def recognise_attention(gm: GraphModule) -> int:
    """``scaled_dot_product_attention`` becomes our attention, which reads heads where they are.

    Returns the number of attentions recognised.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        if argument(node, 4, "dropout_p", 0.0) != 0.0:
            continue
        q, k, v = node.args[:3]
        changed += replace_attention(
            gm,
            node,
            (q, k, v),
            argument(node, 3, "attn_mask"),
            bool(argument(node, 5, "is_causal", False)),
            argument(node, 6, "scale"),
        )
    return finish(gm, changed)


def replace_attention(
    gm: GraphModule,
    node: Node,
    heads: tuple[Any, Any, Any],
    mask: Any,
    causal: bool,
    scale: float | None,
) -> bool:
    """Let our attention of ``heads`` [B, H, tokens, D] take the place of ``node``, if it can."""
    q, *kv = heads
    k, v = (_unrepeated(x, sizes(q)) for x in kv)
    if (sizes(k) or ("",))[1:2] != (sizes(v) or ("",))[1:2]:
        k, v = kv
    if not is_float32(q, k, v, node) or not _fit(q, k, v):
        return False
    value = value_of(q)
    assert value is not None
    if scale is None:
        if type(value.shape[3]) is not int:
            return False
        scale = 1 / math.sqrt(value.shape[3])
    if type(scale) not in (int, float):
        return False
    with gm.graph.inserting_before(node):
        if mask is not None:
            rank = len(sizes(mask) or ())
            shown = value_of(mask)
            for _ in range(4 - rank):
                shown = None if shown is None else shown.unsqueeze(0)
                mask = call(gm.graph, aten.unsqueeze.default, shown, mask, 0)
            if not _is_mask(mask, (*(sizes(q) or ())[:3], (sizes(k) or ())[2])):
                return False
        q, factor = _without_factor(q)
        tokens = [
            call(gm.graph, aten.transpose.int, _swapped(value_of(x)), x, 1, 2) for x in (q, k, v)
        ]
        out = emit(
            gm.graph,
            "attention",
            node,
            q=tokens[0],
            k=tokens[1],
            v=tokens[2],
            mask=mask,
            causal=causal,
            scale=float(scale) * factor,
        )
        out.meta["val"] = _swapped(value)
        back = call(gm.graph, aten.transpose.int, value, out, 1, 2)
    node.replace_all_uses_with(back)
    gm.graph.erase_node(node)
    return True


def _without_factor(q: Node) -> tuple[Node, float]:
    """Queries that are not multiplied by a number before they become heads, and the number.

    Whisper does so; attention multiplies its scores by a number anyway.
    """
    node: Any = q
    while isinstance(node, Node) and node.target in _VIEWS and is_alone(node):
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor or not is_alone(node):
        return q, 1.0
    source, factor = node.args
    if type(factor) not in (int, float) or not math.isfinite(factor):  # type: ignore[arg-type]
        return q, 1.0
    if not isinstance(source, Node) or not is_float32(source):
        return q, 1.0
    node.replace_all_uses_with(source)
    return source if node is q else q, float(factor)  # type: ignore[arg-type]


def _swapped(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.transpose(1, 2)


def _fit(q: object, k: object, v: object) -> bool:
    of_q, of_k, of_v = sizes(q), sizes(k), sizes(v)
    if of_q is None or of_k is None or len(of_q) != 4 or len(of_k) != 4 or of_k != of_v:
        return False
    if of_q[0] != of_k[0] or of_q[3] != of_k[3] or not (of_q[1] + of_k[1]).isdigit():
        return False
    return int(of_k[1]) > 0 and int(of_q[1]) % int(of_k[1]) == 0


def _is_mask(mask: object, scores: tuple[str, ...]) -> bool:
    shape, value = sizes(mask), value_of(mask)
    if shape is None or value is None or len(shape) != 4 or shape[3] != scores[3]:
        return False
    if value.dtype not in (torch.bool, torch.float32):
        return False
    return all(have in (wanted, "1") for have, wanted in zip(shape, scores, strict=True))


def _unrepeated(x: Any, of_q: tuple[str, ...] | None) -> Any:
    """The heads behind ``x``, if it is each of them repeated for a group of queries."""
    if not isinstance(x, Node) or x.target is not aten.reshape.default or of_q is None:
        return x
    repeated = x.args[0]
    if not isinstance(repeated, Node) or repeated.target is not aten.expand.default:
        return x
    single = repeated.args[0]
    if not isinstance(single, Node) or single.target is not aten.unsqueeze.default:
        return x
    heads = single.args[0]
    of_x, of_repeated, of_heads = sizes(x), sizes(repeated), sizes(heads)
    if single.args[1] != 2 or of_x is None or of_repeated is None or of_heads is None:
        return x
    if len(of_x) != 4 or len(of_heads) != 4 or not (of_heads[1] + of_repeated[2]).isdigit():
        return x
    batch, count, tokens, size = of_heads
    group = of_repeated[2]
    wanted = (batch, str(int(count) * int(group)), tokens, size)
    return heads if of_repeated == (batch, count, group, tokens, size) and of_x == wanted else x


def quantize_attention(gm: GraphModule) -> int:
    """An attention whose heads are joined and quantized for the next product quantizes them itself.

    Returns the number of attentions.
    """
    changed = 0
    for attention in nodes_of(gm, "attention"):
        joined = sole_user(attention)
        if joined is None or joined.target is not aten.reshape.default:
            continue
        heads, rows = value_of(attention), value_of(joined)
        quantizer = quantizer_of(joined)
        if quantizer is None or len(joined.users) != 1 or heads is None or rows is None:
            continue
        wanted = [*heads.shape[:2], heads.shape[2] * heads.shape[3]]
        if [str(size) for size in rows.shape] != [str(size) for size in wanted]:
            continue
        with gm.graph.inserting_before(attention):
            _, *results = emit_many(
                gm.graph, "attention_rows", attention, (None, None, None), **attention.kwargs
            )
        take_over(gm, quantizer, dict(enumerate(results)))
        gm.graph.erase_node(joined)
        gm.graph.erase_node(attention)
        changed += 1
    assert not any(is_op(n, "attention") and not n.users for n in gm.graph.nodes)
    return finish(gm, changed)
