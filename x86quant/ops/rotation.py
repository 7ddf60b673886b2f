"""Rotary positions: a head's features, in pairs half a head apart, turned by angles of a token."""

from __future__ import annotations

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._register import register


@register("Tensor x, Tensor cos, Tensor sin")
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x * cos + half(x) * sin`` for float32 ``x`` [B, S, H, D], with an even D.

    ``half(x)`` are the second half of the features, negated, and then the first half. ``cos`` and
    ``sin`` are float32 [B or 1, S or 1, D].
    """
    if x.dim() != 4 or x.shape[3] % 2 or x.dtype != torch.float32:
        raise InvalidInputError(
            "x86quant::rotate: x must be float32 [batch, tokens, heads, size] with an even size, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    for name, angles in (("cos", cos), ("sin", sin)):
        fits = angles.dim() == 3 and angles.dtype == torch.float32
        wanted = (x.shape[0], x.shape[1], x.shape[3])
        if not fits or not all(
            have == want or (have == 1 and dim < 2)
            for dim, (have, want) in enumerate(zip(angles.shape, wanted, strict=True))
        ):
            raise InvalidInputError(
                f"x86quant::rotate: {name} must be float32 of shape {wanted}, the first two or 1, "
                f"got {angles.dtype} {tuple(angles.shape)}"
            )
    first, second = x.chunk(2, -1)
    halves = torch.cat((-second, first), -1)
    return (x * cos.unsqueeze(2) + halves * sin.unsqueeze(2)).contiguous()
