"""Attention becomes one op of ours, which reads heads where they are."""

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
    sizes,
    take_over,
    value_of,
)

aten = torch.ops.aten


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
