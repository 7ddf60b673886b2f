"""Operators of quantized models: codes as ONNX Runtime has them, of which products are in float."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.errors import InvalidInputError
from x86quant.onnx_models.element_types import torch_dtype
from x86quant.onnx_models.operator_table import operator, type_lacks
from x86quant.onnx_models.operators.convolving import convolution


def _over(values: Any, x: Any, axis: int) -> Any:
    """``values``, one for all or for each place of ``axis``, as they are broadcast over ``x``."""
    if values.dim() != 1:
        return values
    if values.shape[0] == 1:
        return values.reshape(())
    sizes = [1] * x.dim()
    sizes[axis] = values.shape[0]
    return values.reshape(sizes)


def _spread(values: Any, x: Any, axis: int, block: int) -> Any:
    """The same for scales or zero points that may be left out, or of blocks of places."""
    if values is None or not block or values.dim() == 0:
        return None if values is None else _over(values, x, axis)
    return values.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])


def check_scale(scale: Any) -> None:
    """Refuse what no code has as its scale.

    Raises:
        InvalidInputError: it is not finite and positive.
    """
    if isinstance(scale, torch.Tensor) and not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise InvalidInputError("its scale is not a finite number above zero")


def to_codes(x: Any, scale: Any, zero: Any, dtype: torch.dtype) -> Any:
    """``x`` in codes of integers."""
    steps = x.to(torch.float32) / scale.to(torch.float32)
    return _rounded(steps, None if zero is None else zero.to(torch.float32), dtype)


def _rounded(steps: Any, zero: Any, dtype: torch.dtype) -> Any:
    """Codes of integers that are so many steps from ``zero``."""
    info = torch.iinfo(dtype)
    codes = torch.round(steps)
    codes = codes if zero is None else codes + zero
    return torch.clamp(codes, info.min, info.max).to(dtype)


def _of_precision(a: Any, inputs: Any, outputs: Any) -> str | None:
    if a.get("precision", 0) not in (0, 1):
        return "another precision than float32"
    return type_lacks(a, inputs, outputs)


@operator("QuantizeLinear", lacks=_of_precision)
def quantize_linear(
    x: Any,
    scale: Any,
    zero: Any = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Any:
    """``x`` in codes."""
    check_scale(scale)
    dtype = torch.uint8 if zero is None else zero.dtype
    if zero is None and output_dtype:
        dtype = torch_dtype(output_dtype, "the result of QuantizeLinear")
    return to_codes(
        x, _spread(scale, x, axis, block_size), _spread(zero, x, axis, block_size), dtype
    )


@operator("DequantizeLinear", lacks=type_lacks)
def dequantize_linear(
    x: Any,
    scale: Any,
    zero: Any = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Any:
    """What codes stand for."""
    check_scale(scale)
    codes = x.to(torch.int32)
    if zero is not None:
        codes = codes - _spread(zero, x, axis, block_size).to(torch.int32)
    kind = torch_dtype(output_dtype, "the result") if output_dtype else scale.dtype
    spread = _spread(scale, x, axis, block_size)
    return (codes.to(torch.float32) * spread.to(torch.float32)).to(kind)


@operator("DynamicQuantizeLinear", returns_tuple=True)
def dynamic_quantize_linear(x: Any) -> Any:
    """``x`` in codes of its own range, their scale and zero point."""
    low, high = torch.clamp(torch.amin(x), max=0.0), torch.clamp(torch.amax(x), min=0.0)
    scale = (high - low) / 255
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.clamp(torch.round(-low / safe), 0, 255).to(torch.uint8)
    return to_codes(x, safe, zero, torch.uint8), scale, zero


def _minus(x: Any, zero: Any, axis: int) -> Any:
    """Codes less their zero point, in float64, where their products are exact."""
    wide = x.to(torch.float64)
    return wide if zero is None else wide - _exact(zero, x, axis)


def _exact(values: Any, x: Any, axis: int) -> Any:
    return _over(values.to(torch.float64), x, axis)


@operator("MatMulInteger")
def matmul_integer(a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    """The product of codes, in int32."""
    found = torch.matmul(_minus(a, a_zero, -2), _minus(b, b_zero, -1))
    return found.to(torch.int32)


@operator("ConvInteger")
def conv_integer(
    x: Any,
    weight: Any,
    x_zero: Any = None,
    weight_zero: Any = None,
    *,
    auto_pad: str,
    dilations: Any = None,
    group: int,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    """The convolution of codes, in int32."""
    found = convolution(
        _minus(x, x_zero, 1), _minus(weight, weight_zero, 0), None, auto_pad=auto_pad,
        dilations=dilations, group=group, pads=pads, strides=strides,
    )  # fmt: skip
    return found.to(torch.int32)


@operator("QLinearMatMul")
def qlinear_matmul(
    a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, scale: Any, zero: Any
) -> Any:
    """The product of codes, in codes."""
    total = torch.matmul(_minus(a, a_zero, -2), _minus(b, b_zero, -1))
    factor = _exact(a_scale, a, -2) * _exact(b_scale, b, -1) / _exact(scale, a, -2)
    return _rounded(total * factor, _exact(zero, a, -2), zero.dtype)


@operator("QLinearConv")
def qlinear_conv(
    x: Any,
    x_scale: Any,
    x_zero: Any,
    weight: Any,
    weight_scale: Any,
    weight_zero: Any,
    scale: Any,
    zero: Any,
    bias: Any = None,
    *,
    auto_pad: str,
    dilations: Any = None,
    group: int,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    """The convolution of codes, in codes."""
    total = convolution(
        _minus(x, x_zero, 1), _minus(weight, weight_zero, 0),
        None if bias is None else bias.to(torch.float64), auto_pad=auto_pad,
        dilations=dilations, group=group, pads=pads, strides=strides,
    )  # fmt: skip
    factor = _exact(x_scale, x, 1) * _exact(weight_scale, x, 1) / _exact(scale, x, 1)
    return _rounded(total * factor, zero.to(torch.float64), zero.dtype)
