"""A decoder's keys and values as int8 codes, with a scale for each token and head.

For the features ``x`` of one token and head::

    scale = max(|x|, 2^-119) / 127
    code  = round(x * float32(127 / max(|x|, 2^-119)))        -127 to 127
    real  = code * scale

Where a feature is not finite the scale is NaN and the codes are 0: what attends to them is NaN.
"""

from __future__ import annotations

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._register import register
from x86quant.ops.attention import cached_attention, check_cache

#: The least magnitude, so that zeros have a scale, too.
_LEAST = 2.0**-119


def cache_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of ``x`` [..., size] and their scales [...], both contiguous."""
    x = x.float()
    finite = x.isfinite().all(-1)
    most = torch.where(finite, x.abs().amax(-1), 1.0).clamp(min=_LEAST)
    inverse = torch.full_like(most, 127.0) / most  # 127.0 / most is a product with a reciprocal
    codes = (x * inverse[..., None]).round().masked_fill(~finite[..., None], 0.0)
    return codes.to(torch.int8), (most / 127.0).masked_fill(~finite, torch.nan)


def from_cache_codes(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The floats that ``codes`` [..., size] and ``scales`` [...] stand for."""
    return codes * scales[..., None]


def _check_cache(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor,
    layer: int,
) -> None:
    check_cache(op, q, k, v, cache, layer, torch.int8)
    if scales.dtype != torch.float32 or scales.shape != cache.shape[:4]:
        raise InvalidInputError(
            f"x86quant::{op}: the scales must be float32 {tuple(cache.shape[:4])}, "
            f"got {scales.dtype} {tuple(scales.shape)}"
        )


@register(
    "Tensor q, Tensor k, Tensor v, Tensor(a!) cache, Tensor(b!) scales, int layer, Tensor length, "
    "Tensor hidden, float scale",
    checks=[_check_cache],
    shapes=lambda q: q.new_empty(q.shape),
)
def int8_cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor,
    layer: int,
    length: torch.Tensor,
    hidden: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """``cached_attention`` where ``cache`` holds codes and ``scales`` [2 layers, B, heads, room].

    The new tokens attend to the codes of themselves, too.
    """
    before, after = int(length), int(length) + q.shape[1]
    # In floats, of this layer alone; the check of what fits is that of the float op.
    held = from_cache_codes(cache[2 * layer : 2 * layer + 2], scales[2 * layer : 2 * layer + 2])
    new = [cache_codes(x.transpose(1, 2)) for x in (k, v)]
    keys, values = (from_cache_codes(*x).transpose(1, 2) for x in new)
    out = cached_attention(q, keys, values, held, 0, length, hidden, scale)
    for number, (codes, of_codes) in enumerate(new, 2 * layer):
        cache[number, :, :, before:after] = codes
        scales[number, :, :, before:after] = of_codes
    return out
