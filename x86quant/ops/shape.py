"""Concatenation, and upsampling of codes. Views (reshape, slice, ...) stay plain aten ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.errors import InvalidInputError
from x86quant.ops._numerics import (
    centred,
    channels_last,
    check_codes,
    check_qparams,
    codes,
    has_values,
)
from x86quant.ops._register import OUT_QPARAMS, X_QPARAMS, register


@register(f"Tensor[] xs, int dim, float[] x_scales, int[] x_zps, {OUT_QPARAMS}")
def cat(
    xs: list[torch.Tensor],
    dim: int,
    x_scales: list[float],
    x_zps: list[int],
    out_scale: float,
    out_zp: int,
) -> torch.Tensor:
    """Concatenate along ``dim``; inputs of other scale or zero point are requantized."""
    check_qparams("cat", out_scale, out_zp)
    if not len(xs) == len(x_scales) == len(x_zps):
        raise InvalidInputError(
            f"x86quant::cat: {len(xs)} tensors need as many scales and zero points, "
            f"got {len(x_scales)} and {len(x_zps)}"
        )
    parts = []
    for x, scale, zero_point in zip(xs, x_scales, x_zps, strict=True):
        check_codes("cat", x=x)
        check_qparams("cat", scale, zero_point)
        if (scale, zero_point) != (out_scale, out_zp) and has_values(x):
            x = codes(centred(x, zero_point) * (scale / out_scale), out_zp)
        parts.append(x)
    # torch.cat of one tensor may return it unchanged; an op must not return its input.
    return channels_last(torch.cat(parts, dim)) if len(parts) > 1 else parts[0].clone()


@register("Tensor[] xs, int dim")
def join(xs: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate floats along ``dim``; they stay as they are."""
    if not xs or any(x.dtype != torch.float32 for x in xs):
        raise InvalidInputError(
            f"x86quant::join takes tensors of float32, got {[str(x.dtype) for x in xs]}"
        )
    return torch.cat(xs, dim) if len(xs) > 1 else xs[0].clone()


@register(
    "Tensor x, SymInt[]? size, float[]? scale_factor, str mode, bool? align_corners, "
    f"{X_QPARAMS}, {OUT_QPARAMS}"
)
def upsample(
    x: torch.Tensor,
    size: list[int] | None,
    scale_factor: list[float] | None,
    mode: str,
    align_corners: bool | None,
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
) -> torch.Tensor:
    """``F.interpolate`` of the reals, to ``size`` or by ``scale_factor``."""
    check_codes("upsample", x=x)
    check_qparams("upsample", x_scale, x_zp)
    check_qparams("upsample", out_scale, out_zp)
    real = F.interpolate(centred(x, x_zp), size, scale_factor, mode, align_corners)
    return codes(real * (x_scale / out_scale), out_zp)
