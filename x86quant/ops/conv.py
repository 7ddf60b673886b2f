"""Convolution (1d, 2d, 3d, transposed) and linear, with their fused epilogue.

For both, with all integer sums exact::

    acc   = sum((x - x_zp) * weight)                                 int32
    acc  += bias                                                     if bias is int32
    steps = float(acc) * float(x_scale * weight_scales / out_scale)  float32, per output channel
    steps += bias / out_scale                                        if bias is float
    steps += (residual - residual_zp) * float(residual_scale / out_scale)
    steps *= slopes where steps < 0                                  if slopes are given (PReLU)
    code  = clamp(round(steps) + out_zp, lo, hi)                     round half to even
    out   = lut[code]                                                if lut is given

``conv_real`` and ``linear_real`` end before the codes, as a product of row codes does
(``ops/dynamic.py``)::

    out = activation(fma(float(acc), x_scale * weight_scale, bias))  float32
"""

from __future__ import annotations

from typing import Any

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._numerics import (
    centred,
    channels_last,
    check_clamp,
    check_codes,
    check_qparams,
    check_table,
    codes,
    has_values,
    like,
)
from x86quant.ops._register import CLAMP, LUT, OUT_QPARAMS, X_QPARAMS, register
from x86quant.ops.dynamic import check_activation, check_weight, finished_sums, row_product
from x86quant.weight_form import features_of

_WEIGHTS = "Tensor weight, Tensor weight_scales, Tensor? bias"
_RESIDUAL = "Tensor? residual=None, float residual_scale=1.0, int residual_zp=0"
_SLOPES = "Tensor? slopes=None"
_TAIL = f"{X_QPARAMS}, {OUT_QPARAMS}, {CLAMP}, {_RESIDUAL}, {LUT}, {_SLOPES}"


@register(
    f"Tensor x, {_WEIGHTS}, int[] stride, int[] padding, int[] dilation, int groups, "
    f"bool transposed, int[] output_padding, {_TAIL}"
)
def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    transposed: bool,
    output_padding: list[int],
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
    lo: int = 0,
    hi: int = 255,
    residual: torch.Tensor | None = None,
    residual_scale: float = 1.0,
    residual_zp: int = 0,
    lut: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolution of ``x`` [N, C, *spatial]; padding stands for the real value 0.

    ``weight`` is [out, C / groups, *kernel], or [C, out / groups, *kernel] when transposed.
    """
    _check_operands("conv", x, weight, residual, lut)
    if x.dim() != weight.dim():
        raise InvalidInputError(
            f"x86quant::conv: the weight has rank {weight.dim()}, so x must have it too, "
            f"got shape {tuple(x.shape)}; add a batch dimension or check the layer's input"
        )
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != channels:
        raise InvalidInputError(
            f"x86quant::conv: expected {channels} input channels, got shape {tuple(x.shape)}"
        )
    how = (stride, padding, dilation, transposed, output_padding, groups)
    acc = _exact_sums(x, x_zp, weight, how)
    _check_epilogue("conv", (x_scale, x_zp), (out_scale, out_zp), lo, hi)
    _check_residual(residual, acc.shape, residual_scale, residual_zp)
    _check_slopes("conv", slopes, acc.shape[1])
    if not has_values(acc):
        return like(acc, torch.uint8)
    per_channel = [1, -1] + [1] * (x.dim() - 2)
    steps = _steps(acc, weight_scales, bias, x_scale, out_scale, per_channel)
    steps = _add_residual(steps, residual, residual_scale, residual_zp, out_scale)
    return codes(_sloped(steps, slopes, per_channel), out_zp, lo, hi, lut)


@register(f"Tensor x, {_WEIGHTS}, {_TAIL}")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
    lo: int = 0,
    hi: int = 255,
    residual: torch.Tensor | None = None,
    residual_scale: float = 1.0,
    residual_zp: int = 0,
    lut: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` [..., K] times the transpose of ``weight`` [N, K]: [..., N]."""
    _check_operands("linear", x, weight, residual, lut)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise InvalidInputError(
            f"x86quant::linear: expected {weight.shape[1]} input features, "
            f"got shape {tuple(x.shape)}"
        )
    acc = (x.to(torch.float64) - x_zp) @ weight.to(torch.float64).t()
    _check_epilogue("linear", (x_scale, x_zp), (out_scale, out_zp), lo, hi)
    _check_residual(residual, acc.shape, residual_scale, residual_zp)
    _check_slopes("linear", slopes, acc.shape[-1])
    if not has_values(acc):
        return like(acc, torch.uint8)
    steps = _steps(acc, weight_scales, bias, x_scale, out_scale, [-1])
    steps = _add_residual(steps, residual, residual_scale, residual_zp, out_scale)
    return codes(_sloped(steps, slopes, [-1]), out_zp, lo, hi, lut)


def _check_codes_and_activation(
    op: str, x: torch.Tensor, x_scale: float, x_zp: int, activation: str | None
) -> None:
    """What is the same for all products of codes that give floats."""
    check_codes(op, x=x)
    check_qparams(op, x_scale, x_zp)
    check_activation(op, activation)


def _check_conv_real(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    if weight.dim() not in (3, 4, 5):
        raise InvalidInputError(
            "x86quant::conv_real: expected a weight [out, *kernel, C] of one to three dimensions, "
            f"got shape {tuple(weight.shape)}"
        )
    check_weight("conv_real", weight.flatten(1), weight_scale, bias)
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[-1]:
        raise InvalidInputError(
            f"x86quant::conv_real: expected {weight.dim()} dimensions, {weight.shape[-1]} channels "
            f"among them, got shape {tuple(x.shape)}"
        )


@register(
    f"Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int[] stride, int[] padding, "
    f"int[] dilation, {X_QPARAMS}, str? activation=None, bool contiguous=False",
    checks=[_check_codes_and_activation, _check_conv_real],
)
def conv_real(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    x_scale: float,
    x_zp: int,
    activation: str | None = None,
    contiguous: bool = False,
) -> torch.Tensor:
    """Convolution of ``x`` [N, C, *spatial], not rounded: float32. Padding stands for the real 0.

    ``weight`` is [out, *kernel, C]: as codes lie, channels last. So does the result, unless it is
    to be ``contiguous``.
    """
    how = (stride, padding, dilation, False, [0] * len(stride), 1)
    sums = _exact_sums(x, x_zp, weight.movedim(-1, 1), how)
    steps = weight_scale * torch.tensor(x_scale, dtype=torch.float32)
    found = finished_sums(sums.movedim(1, -1), steps, bias, activation).movedim(-1, 1)
    return found.contiguous() if contiguous else channels_last(found)


#: Sums of integers up to here are exact in float32, in whatever order they are added.
_EXACT_FLOAT32 = 1 << 24
_LARGEST_CODE, _LARGEST_WEIGHT, _HALF = 255, 128, 16


def _exact_sums(
    x: torch.Tensor, x_zp: int, weight: torch.Tensor, how: tuple[Any, ...]
) -> torch.Tensor:
    """The integer sums of a convolution of codes, as float64; ``how`` ends aten's arguments.

    float64 holds every sum exactly, and takes several times as long as float32, which holds those
    of few codes, or of halves of more.
    """
    transposed, groups = how[3], how[5]
    per_place = weight.numel() // (weight.shape[1] * groups if transposed else weight.shape[0])

    def sums(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten.convolution(x, weight.to(x.dtype), None, *how)
        return found

    if per_place * _LARGEST_CODE * _LARGEST_WEIGHT <= _EXACT_FLOAT32:
        return sums(x.to(torch.float32) - x_zp).to(torch.float64)
    if per_place * _HALF * _LARGEST_WEIGHT > _EXACT_FLOAT32:
        return sums(x.to(torch.float64) - x_zp)
    high = torch.floor((x.to(torch.float32) - x_zp) / _HALF)
    low = x.to(torch.float32) - x_zp - _HALF * high
    return sums(high).to(torch.float64) * _HALF + sums(low)


def _check_linear_real(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    check_weight("linear_real", weight, weight_scale, bias)
    if x.dim() == 0 or x.shape[-1] != features_of(weight):
        raise InvalidInputError(
            f"x86quant::linear_real: expected {features_of(weight)} input features, "
            f"got shape {tuple(x.shape)}"
        )


def _linear_real_packed(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: float,
    x_zp: int,
    activation: str | None,
) -> torch.Tensor | None:
    from x86quant.packing.linear_dynamic import row_linear  # the ops alone need no kernels

    pack = row_linear((weight, weight_scale, bias), activation)
    if pack is None:
        return None
    scale = torch.full(x.shape[:-1], x_scale, dtype=torch.float32)
    zero_point = torch.full_like(scale, x_zp, dtype=torch.int32)
    out: torch.Tensor = pack.floats(x, scale, zero_point)
    return out


@register(
    f"Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, {X_QPARAMS}, "
    "str? activation=None",
    checks=[_check_codes_and_activation, _check_linear_real],
    shapes=lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
    native=_linear_real_packed,
)
def linear_real(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: float,
    x_zp: int,
    activation: str | None = None,
) -> torch.Tensor:
    """``x`` [..., K] times the transpose of ``weight`` [N, K], not rounded: float32 [..., N]."""
    rows = x.reshape(x.shape[:-1].numel(), features_of(weight))
    scale = torch.full((rows.shape[0], 1), x_scale, dtype=torch.float32)
    zero_point = torch.full_like(scale, x_zp)
    out = row_product(rows, scale, zero_point, weight, weight_scale, bias, activation)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _steps(
    acc: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: float,
    out_scale: float,
    per_channel: list[int],
) -> torch.Tensor:
    """The accumulator and bias in units of the output scale, as float32."""
    if bias is not None and bias.dtype == torch.int32:
        acc = acc + bias.to(torch.float64).reshape(per_channel)
    factors = (weight_scales.to(torch.float64) * (x_scale / out_scale)).to(torch.float32)
    steps = acc.to(torch.float32) * factors.reshape(per_channel)
    if bias is not None and bias.dtype != torch.int32:
        steps = steps + (bias.to(torch.float32) * (1.0 / out_scale)).reshape(per_channel)
    return steps


def _add_residual(
    steps: torch.Tensor,
    residual: torch.Tensor | None,
    scale: float,
    zero_point: int,
    out_scale: float,
) -> torch.Tensor:
    if residual is None:
        return steps
    return steps + centred(residual, zero_point) * (scale / out_scale)


def _sloped(
    steps: torch.Tensor, slopes: torch.Tensor | None, per_channel: list[int]
) -> torch.Tensor:
    if slopes is None:
        return steps
    return torch.where(steps < 0, steps * slopes.reshape(per_channel), steps)


def _check_slopes(op: str, slopes: torch.Tensor | None, channels: int) -> None:
    if slopes is None or (slopes.dtype is torch.float32 and slopes.shape == (channels,)):
        return
    raise InvalidInputError(
        f"x86quant::{op}: slopes must be {channels} float32 values, one an output channel, "
        f"got {slopes.dtype} of shape {tuple(slopes.shape)}"
    )


def _check_residual(
    residual: torch.Tensor | None, shape: torch.Size, scale: float, zero_point: int
) -> None:
    if residual is None:
        return
    if residual.shape != shape:
        raise InvalidInputError(
            f"x86quant: the residual has shape {tuple(residual.shape)}, "
            f"the output {tuple(shape)}; they must be equal"
        )
    check_qparams("residual", scale, zero_point)


def _check_operands(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    lut: torch.Tensor | None,
) -> None:
    check_codes(op, x=x, residual=residual)
    check_table(op, lut)
    if weight.dtype != torch.int8:
        raise InvalidInputError(f"x86quant::{op}: weight must be int8, got {weight.dtype}")


def _check_epilogue(
    op: str, x: tuple[float, int], out: tuple[float, int], lo: int, hi: int
) -> None:
    check_qparams(op, *x)
    check_qparams(op, *out)
    check_clamp(op, lo, hi)
