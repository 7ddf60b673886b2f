"""Sum and product of two quantized tensors, and a per-channel affine map of one."""

from __future__ import annotations

import torch

from x86quant.ops._numerics import (
    centred,
    check_clamp,
    check_codes,
    check_qparams,
    check_table,
    codes,
)
from x86quant.ops._register import CLAMP, LUT, OUT_QPARAMS, X_QPARAMS, register

_BINARY = (
    "Tensor a, Tensor b, float a_scale, int a_zp, float b_scale, int b_zp, "
    f"{OUT_QPARAMS}, {CLAMP}, {LUT}"
)


@register(_BINARY)
def add(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: float,
    a_zp: int,
    b_scale: float,
    b_zp: int,
    out_scale: float,
    out_zp: int,
    lo: int = 0,
    hi: int = 255,
    lut: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a + b`` with broadcasting: the reals over the output scale are added in float32."""
    _check("add", (a, b), ((a_scale, a_zp), (b_scale, b_zp), (out_scale, out_zp)), lo, hi, lut)
    steps = centred(a, a_zp) * (a_scale / out_scale) + centred(b, b_zp) * (b_scale / out_scale)
    return codes(steps, out_zp, lo, hi, lut)


@register(_BINARY)
def mul(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: float,
    a_zp: int,
    b_scale: float,
    b_zp: int,
    out_scale: float,
    out_zp: int,
    lo: int = 0,
    hi: int = 255,
    lut: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a * b`` with broadcasting: the integer product times one float32 factor."""
    _check("mul", (a, b), ((a_scale, a_zp), (b_scale, b_zp), (out_scale, out_zp)), lo, hi, lut)
    product = centred(a, a_zp) * centred(b, b_zp)
    return codes(product * (a_scale * b_scale / out_scale), out_zp, lo, hi, lut)


@register(
    f"Tensor x, Tensor scale, Tensor shift, int axis, {X_QPARAMS}, {OUT_QPARAMS}, {CLAMP}, {LUT}"
)
def affine(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    axis: int,
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
    lo: int = 0,
    hi: int = 255,
    lut: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x * scale + shift`` with one float scale and shift for each index along ``axis``.

    Batch normalization and multiplication by a constant vector are this.
    """
    _check("affine", (x,), ((x_scale, x_zp), (out_scale, out_zp)), lo, hi, lut)
    shape = [1] * x.dim()
    shape[axis] = -1
    factor = (scale.to(torch.float64) * (x_scale / out_scale)).to(torch.float32).reshape(shape)
    offset = (shift.to(torch.float64) / out_scale).to(torch.float32).reshape(shape)
    return codes(centred(x, x_zp) * factor + offset, out_zp, lo, hi, lut)


def _check(
    op: str,
    tensors: tuple[torch.Tensor, ...],
    qparams: tuple[tuple[float, int], ...],
    lo: int,
    hi: int,
    lut: torch.Tensor | None,
) -> None:
    for tensor in tensors:
        check_codes(op, input=tensor)
    for scale, zero_point in qparams:
        check_qparams(op, scale, zero_point)
    check_clamp(op, lo, hi)
    check_table(op, lut)
