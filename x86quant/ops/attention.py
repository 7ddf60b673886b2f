"""Attention on float32 heads, in one op that never needs to hold the scores.

For each batch, head and query, with the head of keys and values that the query's head belongs to::

    s    = scale * q . k                  over all keys that the query may see
    s   += mask                           if the mask is additive
    out  = sum(softmax(s) * v)            0 where the query may see no key

A query may see a key where a boolean mask is true, where an additive mask is not minus infinity,
and where ``causal`` lets it: query i sees keys 0 to i. That is what
``torch.nn.functional.scaled_dot_product_attention`` computes. Products may be taken in bfloat16
where that is faster; softmax is in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from x86quant import extension
from x86quant.errors import InvalidInputError
from x86quant.ops._register import register
from x86quant.ops.rows import THREE, RowCodes, new_row_codes, quantize_rows

_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale"


def _attention_native(*given: Any) -> torch.Tensor | None:
    from x86quant.packing.linear_dynamic import extension_loads  # the ops alone need no kernels

    return extension.native().native_attention(*given) if extension_loads() else None


@register(
    _ARGUMENTS,
    checks=[lambda op, q, k, v, mask, scale: check_attention(op, q, k, v, mask, scale)],
    shapes=lambda q: q.new_empty(q.shape),
    native=_attention_native,
)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention of ``q`` [B, S, H, D] to ``k`` and ``v`` [B, T, heads, D]: [B, S, H, D].

    ``heads`` divides H: that many heads of queries share a head of keys. Strides are free.
    ``mask`` is bool or float32 [B or 1, H or 1, S or 1, T].
    """
    group = q.shape[2] // k.shape[2]
    queries = q.transpose(1, 2)
    keys = k.transpose(1, 2).repeat_interleave(group, 1)
    values = v.transpose(1, 2).repeat_interleave(group, 1)
    scores = queries @ keys.transpose(2, 3) * scale
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    sees_none = (scores == -torch.inf).all(-1, keepdim=True)
    shares = torch.softmax(scores, -1).masked_fill(sees_none, 0.0)
    return (shares @ values).transpose(1, 2).contiguous()


def _attention_rows_native(*given: Any) -> RowCodes | None:
    out = _attention_native(*given)
    return None if out is None else extension.native().native_quantize_rows(out.flatten(2))


@register(
    _ARGUMENTS,
    checks=[lambda op, q, k, v, mask, scale: check_attention(op, q, k, v, mask, scale)],
    shapes=lambda q: new_row_codes(q, (*q.shape[:2], q.shape[2] * q.shape[3])),
    native=_attention_rows_native,
    returns=THREE,
)
def attention_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> RowCodes:
    """Row codes [B, S, H * D] of ``attention``: the heads of a token are one row."""
    out = attention(q, k, v, mask, causal, scale)
    return quantize_rows(out.reshape(*q.shape[:2], q.shape[2] * q.shape[3]))


def check_attention(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> None:
    """Raise InvalidInputError unless the operands of an attention fit each other."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != torch.float32 or tensor.dim() != 4:
            raise InvalidInputError(
                f"x86quant::{op}: {name} must be float32 of shape [batch, tokens, heads, size], "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
    batch, queries, heads, size = q.shape
    if k.shape != v.shape:
        raise InvalidInputError(
            f"x86quant::{op}: k and v must have one shape, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[0] != batch or k.shape[3] != size:
        raise InvalidInputError(
            f"x86quant::{op}: q and k must agree in batch and size of heads, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if k.shape[2] == 0 or heads % k.shape[2] != 0:
        raise InvalidInputError(
            f"x86quant::{op}: the {heads} heads of q must be a multiple of the {k.shape[2]} of k"
        )
    if not math.isfinite(scale):
        raise InvalidInputError(f"x86quant::{op}: scale must be finite, got {scale}")
    if mask is not None:
        _check_mask(op, mask, (batch, heads, queries, k.shape[1]))


def _check_mask(op: str, mask: torch.Tensor, scores: tuple[int, ...]) -> None:
    if mask.dtype not in (torch.bool, torch.float32):
        raise InvalidInputError(
            f"x86quant::{op}: the mask must be bool or float32, got {mask.dtype}; "
            "write mask.bool() if nonzero numbers are tokens to be seen"
        )
    fits = mask.dim() == 4 and mask.shape[3] == scores[3]
    fits = fits and all(
        have == wanted or have == 1 for have, wanted in zip(mask.shape, scores, strict=True)
    )
    if not fits:
        raise InvalidInputError(
            f"x86quant::{op}: the mask has shape {tuple(mask.shape)}, the scores {tuple(scores)}; "
            "the mask must have 4 dimensions, each equal or 1, and the last equal"
        )


@register(
    "Tensor q, Tensor k, Tensor v, Tensor(a!) cache, int layer, Tensor length, Tensor hidden, "
    "float scale",
    checks=[lambda op, q, k, v, cache, layer: check_cache(op, q, k, v, cache, layer)],
    shapes=lambda q: q.new_empty(q.shape),
)
def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    length: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of a decoder's newest tokens, ``q`` [B, S, H, D]: each to itself and all before it.

    ``k`` and ``v`` [B, S, heads, D] are written behind the ``length`` (int64 [1]) tokens that
    ``cache`` [2 layers, B, heads, room, D] holds: keys of layer i are its part 2 i, values the next
    one. Then it is ``attention`` to the first ``length`` + S of them, of which nobody sees the
    first ``hidden`` (int64 [B]) ones: padding in front.
    """
    before, tokens = int(length), q.shape[1]
    after = before + tokens
    if before < 0 or after > cache.shape[3]:
        raise InvalidInputError(
            f"x86quant::cached_attention: a cache with room for {cache.shape[3]} tokens cannot "
            f"take {tokens} behind {before}"
        )
    if hidden.shape != q.shape[:1] or not bool(((hidden >= 0) & (hidden < after)).all()):
        raise InvalidInputError(
            f"x86quant::cached_attention: of {after} tokens {hidden.tolist()} cannot be hidden in "
            f"{q.shape[0]} sequences"
        )
    held = []
    for part, new in zip(cache[2 * layer : 2 * layer + 2], (k, v), strict=True):
        part[:, :, before:after] = new.transpose(1, 2)
        held.append(part[:, :, :after].transpose(1, 2))
    keys, values = held
    return attention(q, keys, values, newest_sees(hidden, q, keys), False, scale)


@register(
    "Tensor hidden, Tensor new, Tensor held",
    shapes=lambda hidden, new, held: hidden.new_empty(
        (hidden.shape[0], 1, new.shape[1], held.shape[1]), dtype=torch.bool
    ),
)
def newest_sees(hidden: torch.Tensor, new: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Which keys a decoder's newest tokens see, bool [B, 1, S, T].

    ``new`` [B, S, ...] are the last of ``held`` [B, T, ...]: each sees itself and those before it,
    but for the first ``hidden`` (int64 [B]).
    """
    keys = torch.arange(held.shape[1])
    queries = keys[held.shape[1] - new.shape[1] :]
    return (keys <= queries[:, None]) & (keys >= hidden[:, None, None, None])


def check_cache(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise InvalidInputError unless ``op`` can add ``k`` and ``v`` to ``cache`` of ``dtype``."""
    check_attention(op, q, k, v, None, 1.0)
    batch, tokens, heads, size = k.shape
    parts = cache.shape[0] if cache.dim() == 5 else 0
    fits = cache.dtype == dtype and 0 <= 2 * layer < parts - 1
    if not fits or (batch, heads, size) != (*cache.shape[1:3], cache.shape[4]):
        raise InvalidInputError(
            f"x86quant::{op}: the cache must be {str(dtype).removeprefix('torch.')} [2 layers, "
            f"{batch}, {heads}, room, {size}] with a layer {layer}, "
            f"got {cache.dtype} {tuple(cache.shape)}"
        )
    if tokens != q.shape[1]:
        raise InvalidInputError(
            f"x86quant::{op}: q and k must hold as many tokens, got {tuple(q.shape)} "
            f"and {tuple(k.shape)}"
        )
