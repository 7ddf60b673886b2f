"""Between reals and codes: quantize, dequantize, requantize, look-up in tables of either."""

from __future__ import annotations

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._numerics import (
    centred,
    channels_last,
    check_codes,
    check_qparams,
    check_table,
    codes,
    has_values,
    like,
    lookup,
)
from x86quant.ops._register import OUT_QPARAMS, X_QPARAMS, register


@register(f"Tensor x, {OUT_QPARAMS}")
def quantize(x: torch.Tensor, out_scale: float, out_zp: int) -> torch.Tensor:
    """``clamp(round(x * float32(1 / scale)) + zp, 0, 255)``; NaN becomes 0."""
    check_qparams("quantize", out_scale, out_zp)
    if x.dtype != torch.float32:
        raise InvalidInputError(
            f"x86quant::quantize: x must be float32, got {x.dtype}; call .float() on it"
        )
    return codes(x * (1.0 / out_scale) if has_values(x) else x, out_zp)


@register(f"Tensor x, {X_QPARAMS}, bool contiguous=False")
def dequantize(
    x: torch.Tensor, x_scale: float, x_zp: int, contiguous: bool = False
) -> torch.Tensor:
    """``(x - zp) * scale`` in float32; channels last unless it is to be ``contiguous``."""
    check_codes("dequantize", x=x)
    check_qparams("dequantize", x_scale, x_zp)
    if not has_values(x) and not contiguous:
        return like(x, torch.float32)
    real = centred(x, x_zp) * x_scale
    return real.contiguous() if contiguous else channels_last(real)


@register("Tensor weight, Tensor weight_scales, int axis")
def dequantize_weight(weight: torch.Tensor, weight_scales: torch.Tensor, axis: int) -> torch.Tensor:
    """``weight * weight_scales`` along ``axis``: the float weight an int8 weight stands for."""
    shape = [1] * weight.dim()
    shape[axis] = -1
    return weight.to(torch.float32) * weight_scales.reshape(shape)


@register(f"Tensor x, {X_QPARAMS}, {OUT_QPARAMS}")
def requantize(
    x: torch.Tensor, x_scale: float, x_zp: int, out_scale: float, out_zp: int
) -> torch.Tensor:
    """The same reals in other codes: ``round((x - x_zp) * (x_scale / out_scale)) + out_zp``."""
    check_codes("requantize", x=x)
    check_qparams("requantize", x_scale, x_zp)
    check_qparams("requantize", out_scale, out_zp)
    return codes(centred(x, x_zp) * (x_scale / out_scale), out_zp)


@register("Tensor x, Tensor table")
def lut(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``table[x]``: any unary function between two quantized tensors."""
    check_codes("lut", x=x)
    check_table("lut", table)
    return channels_last(lookup(x, table))


@register("Tensor x, Tensor table, bool contiguous=False")
def lut_real(x: torch.Tensor, table: torch.Tensor, contiguous: bool = False) -> torch.Tensor:
    """``table[x]``, 256 floats: any unary function of a quantized tensor that floats read.

    It is laid out as by ``dequantize``.
    """
    check_codes("lut_real", x=x)
    check_table("lut_real", table, torch.float32)
    real = lookup(x, table)
    return real.contiguous() if contiguous else channels_last(real)
