"""Operators of quantized models: codes as ONNX Runtime has them, of which products are in float."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.errors import InvalidInputError
from x86quant.onnx_models.element_types import torch_dtype
from x86quant.onnx_models.operator_table import operator, type_lacks
from x86quant.onnx_models.operators.convolving import convolution


def _spread(values: Any, x: Any, axis: int, block: int = 0) -> Any:
    """Scales or zero points, one for all or for each place of ``axis``, over ``x``."""
    if values is None or values.dim() == 0:
        return values
    if block:
        found = values.repeat_interleave(block, axis)
        return found.narrow(axis, 0, x.shape[axis])
    axis = axis + x.dim() if axis < 0 else axis
    if values.dim() > 1:
        return values
    if values.shape[0] == 1:
        return values.reshape(())
    sizes = [1] * x.dim()
    sizes[axis] = values.shape[0]
    return values.reshape(sizes)


def check_scale(scale: Any) -> None:
    """Refuse what no code has as its scale.

    Raises:
        InvalidInputError: it is not finite and positive.
    """
    if isinstance(scale, torch.Tensor) and not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise InvalidInputError("its scale is not a finite number above zero")


def to_codes(x: Any, scale: Any, zero: Any, dtype: torch.dtype) -> Any:
    """``x`` in codes of integers."""
    info = torch.iinfo(dtype)
    codes = torch.round(x.to(torch.float32) / scale.to(torch.float32))
    if zero is not None:
        codes = codes + zero.to(torch.float32)
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
    if zero is None:
        return wide
    if zero.dim() == 1 and zero.shape[0] > 1:
        sizes = [1] * x.dim()
        sizes[axis] = zero.shape[0]
        zero = zero.reshape(sizes)
    elif zero.dim() == 1:
        zero = zero.reshape(())
    return wide - zero.to(torch.float64)


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
    factor = _rows(a_scale, -2, a) * _rows(b_scale, -1, b) / _rows(scale, -2, a)
    info = torch.iinfo(zero.dtype)
    codes = torch.round(total * factor) + _rows(zero, -2, a)
    return torch.clamp(codes, info.min, info.max).to(zero.dtype)


def _rows(values: Any, axis: int, x: Any) -> Any:
    wide = values.to(torch.float64)
    if values.dim() != 1 or values.shape[0] == 1:
        return wide.reshape(()) if values.dim() == 1 else wide
    sizes = [1] * x.dim()
    sizes[axis] = values.shape[0]
    return wide.reshape(sizes)


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
    factor = _rows(x_scale, 1, x) * _rows(weight_scale, 1, x) / _rows(scale, 1, x)
    info = torch.iinfo(zero.dtype)
    codes = torch.round(total * factor) + zero.to(torch.float64)
    return torch.clamp(codes, info.min, info.max).to(zero.dtype)
