"""Attention in float between int8 layers: a kernel of ours, which never holds the scores."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    constant,
    emit,
    finish,
    given_by_name,
    inherit,
    replace,
    why,
)

aten = torch.ops.aten

_SPELLINGS = frozenset([F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default])
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
#: Of batches of heads of tokens.
_RANK = 4


def lower_attention(gm: GraphModule) -> int:
    """``scaled_dot_product_attention`` becomes ``x86quant.attention``.

    Returns the number of attentions lowered.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _SPELLINGS:
            given = given_by_name(node, _ARGUMENTS)
            changed += _lower(gm, node, given)
    return finish(gm, changed)


def _lower(gm: GraphModule, node: Node, given: dict[str, Any]) -> bool:
    heads = [given[name] for name in _ARGUMENTS[:3]]
    q, k, v = map(_shape, heads)
    behind = v[3] - k[3] if v and k and len(v) == len(k) == _RANK else -1
    if not q or not k or not v or behind < 0 or not _are_heads(q, k, v):
        why(node, "its queries, keys and values are not [batch, heads, tokens, size]")
        return False
    if given.get("dropout_p") or q[0] != k[0] or not _is_float(*heads):
        why(node, "it is not of float32 tensors without dropout")
        return False
    mask, scale = given.get("attn_mask"), given.get("scale")
    of_mask, dtype = _described(gm, mask)
    if mask is not None and not _is_mask(of_mask, dtype, (*q[:3], k[2])):
        why(node, "its mask is not bool or float32, of sizes that its scores have")
        return False
    with gm.graph.inserting_before(node):
        for _ in range(_RANK - len(of_mask or q)):
            mask = gm.graph.call_function(aten.unsqueeze.default, (mask, 0))
        if behind:  # zeros add nothing to the product of both
            heads[:2] = [_wider(gm, x, behind) for x in heads[:2]]
        swapped = [inherit(gm.graph.call_method("transpose", (x, 1, 2)), x) for x in heads]
        out = emit(
            gm.graph, "attention", node,
            q=swapped[0], k=swapped[1], v=swapped[2], mask=mask,
            causal=bool(given.get("is_causal")),
            scale=1 / math.sqrt(q[3]) if scale is None else float(scale),
        )  # fmt: skip
        for new, (batch, number, tokens, _) in zip((*swapped, out), (q, k, v, q), strict=True):
            new.meta["shape"] = torch.Size((batch, tokens, number, v[3]))
        back = gm.graph.call_method("transpose", (out, 1, 2))
    replace(node, inherit(back, node))
    return True


def _are_heads(q: torch.Size, k: torch.Size, v: torch.Size) -> bool:
    return len(q) == _RANK and k[:3] == v[:3] and q[3] == k[3] and q[1] % k[1] == 0


def _wider(gm: GraphModule, x: Node, zeros: int) -> Node:
    new = inherit(gm.graph.call_function(F.pad, (x, [0, zeros], "constant", 0.0)), x)
    new.meta.update(shape=torch.Size([*x.meta["shape"][:-1], x.meta["shape"][-1] + zeros]))
    return new


def _shape(x: object) -> torch.Size | None:
    return x.meta.get("shape") if isinstance(x, Node) else None


def _is_float(*values: object) -> bool:
    return all(isinstance(x, Node) and x.meta.get("dtype") is torch.float32 for x in values)


def _described(gm: GraphModule, x: object) -> tuple[Any, Any]:
    """Shape and type of ``x``, a constant or a value that was seen."""
    held = constant(gm, x)
    if held is not None:
        return held.shape, held.dtype
    return (_shape(x), x.meta.get("dtype")) if isinstance(x, Node) else (None, None)


def _is_mask(shape: Any, dtype: Any, scores: tuple[int, ...]) -> bool:
    if dtype not in (torch.bool, torch.float32) or not 0 < len(shape or ()) <= _RANK:
        return False
    behind = scores[_RANK - len(shape) :]
    fits = all(have in (wanted, 1) for have, wanted in zip(shape, behind, strict=True))
    return fits and bool(shape[-1] == scores[-1])
