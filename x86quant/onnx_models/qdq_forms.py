"""Our operators as ONNX has them: codes to floats, an operator on floats, floats to codes.

This form, QDQ, is what runtimes of ONNX know as quantized: they fuse it to their int8 kernels. What
is left of our own are ``quantize``, ``dequantize``, ``dequantize_weight``, ``lut`` and
``lut_real``, which ``writing_onnx`` writes as ONNX operators. Operators that are not here are
spelled by their own definition in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, attribute, is_op, set_kwargs
from x86quant.ops._numerics import with_values
from x86quant.ops.dynamic import ACTIVATIONS, row_codes
from x86quant.ops.float_conv import functions_of
from x86quant.plain_ops import PLAIN

_OPS: Any = torch.ops.x86quant
#: What ``writing_onnx`` writes.
KEPT = ("quantize", "dequantize", "dequantize_weight", "lut", "lut_real")
#: A bias of more units than this stays float: int32 sums add it to the products.
_MOST_UNITS = 2**30


@torch.library.custom_op("x86quant_onnx::int_product", mutates_args=())
def int_product(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of uint8 codes [M, K] and int8 weights [K, N] in int32: ONNX's MatMulInteger."""
    return (codes.double() @ weight.double()).to(torch.int32)


@int_product.register_fake
def _(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return codes.new_empty((codes.shape[0], weight.shape[1]), dtype=torch.int32)


def count_biases(graph: GraphModule) -> None:
    """Biases of convolutions and linears in whole units of their products, where they fit.

    Runtimes fuse such alone. Half of a unit, by which it changes a sum, is less than a product.
    """
    for node in list(graph.graph.nodes):
        if not (is_op(node, "conv") or is_op(node, "linear")):
            continue
        bias, scales = (node.kwargs[name] for name in ("bias", "weight_scales"))
        if not isinstance(bias, Node) or bias.op != "get_attr" or scales.op != "get_attr":
            continue
        value = attribute(graph, str(bias.target))
        units = attribute(graph, str(scales.target)).double() * node.kwargs["x_scale"]
        if value.dtype == torch.int32 or bool((units <= 0).any()):
            continue
        counted = torch.round(value.double() / units)
        if float(counted.abs().max()) >= _MOST_UNITS:
            continue
        with graph.graph.inserting_before(node):
            units_of = add_constant(graph, graph.graph, str(bias.target), counted.to(torch.int32))
        set_kwargs(node, bias=units_of)
    graph.recompile()


def spellings() -> dict[Any, Callable[..., Any]]:
    """What stands for each operator of ours, for ``ExportedProgram.run_decompositions``."""
    own: dict[str, Callable[..., Any]] = {
        "conv": _conv,
        "conv_real": _conv_real,
        "float_conv": _float_conv,
        "float_conv_codes": _float_conv_codes,
        "linear": _linear,
        "linear_real": _linear_real,
        "linear_dynamic": _linear_dynamic,
        "add": _add,
        "mul": _mul,
        "affine": _affine,
        "requantize": _requantize,
        "max_pool": _max_pool,
        "avg_pool": _avg_pool,
        "adaptive_avg_pool": _adaptive_avg_pool,
        "cat": _cat,
        "upsample": _upsample,
    }
    found: dict[Any, Callable[..., Any]] = {}
    for name, plain in PLAIN.items():
        if name not in KEPT:
            packet = getattr(_OPS, name)
            spelled: Callable[..., Any] = own.get(name) or with_values(plain)
            found[packet.default] = spelled
    return found


def _real(x: Any, scale: float, zero_point: int) -> Any:
    return _OPS.dequantize(x, scale, zero_point, True)


def _codes(
    x: Any, scale: float, zero_point: int, lo: int = 0, hi: int = 255, lut: Any = None
) -> Any:
    """``x`` as codes between ``lo`` and ``hi``, looked up."""
    if lo == zero_point and hi == 255:
        x = F.relu(x)
    elif lo > 0 or hi < 255:
        x = x.clamp((lo - zero_point) * scale, (hi - zero_point) * scale)
    found = _OPS.quantize(x, scale, zero_point)
    return found if lut is None else _OPS.lut(found, lut)


def _weight(weight: Any, scales: Any, axis: int) -> Any:
    return _OPS.dequantize_weight(weight, scales, axis)


def _bias(bias: Any, weight_scales: Any, x_scale: float) -> Any:
    if bias is None or bias.dtype != torch.int32:
        return bias
    return _weight(bias, weight_scales * x_scale, 0)


def _finished(
    channel: int,
    x: Any,
    out_scale: float,
    out_zp: int,
    lo: int = 0,
    hi: int = 255,
    residual: Any = None,
    residual_scale: float = 1.0,
    residual_zp: int = 0,
    lut: Any = None,
    slopes: Any = None,
) -> Any:
    """What stands behind a product, in the order of the operators' arguments.

    Its channels lie along the dimension ``channel``.
    """
    if residual is not None:
        x = x + _real(residual, residual_scale, residual_zp)
    if slopes is not None:
        by_channel = channel % x.dim() == 1  # as PRelu has it
        x = F.prelu(x, slopes) if by_channel else torch.where(x < 0, x * slopes, x)
    return _codes(x, out_scale, out_zp, lo, hi, lut)


def _conv(
    x: Any,
    weight: Any,
    scales: Any,
    bias: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    transposed: bool,
    output_padding: list[int],
    x_scale: float,
    x_zp: int,
    *out: Any,
    **more: Any,
) -> Any:
    if transposed and groups > 1:  # a scale for each channel of a group has no axis in ONNX
        shape = (groups, weight.shape[0] // groups, *weight.shape[1:])
        of_group = scales.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))
        real_weight = (weight.reshape(shape).float() * of_group).reshape(weight.shape)
    else:
        real_weight = _weight(weight, scales, 1 if transposed else 0)
    operands = (_real(x, x_scale, x_zp), real_weight, _bias(bias, scales, x_scale))
    window = (stride, padding, dilation, transposed, output_padding, groups)
    return _finished(1, torch.ops.aten.convolution.default(*operands, *window), *out, **more)


def _conv_real(
    x: Any,
    weight: Any,
    weight_scale: Any,
    bias: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    x_scale: float,
    x_zp: int,
    activation: str | None = None,
    contiguous: bool = False,
) -> Any:
    del contiguous  # ONNX has one layout
    operands = (_real(x, x_scale, x_zp), _weight(weight.movedim(-1, 1), weight_scale, 0), bias)
    window = (stride, padding, dilation, False, [0] * len(stride), 1)
    return _activated(torch.ops.aten.convolution.default(*operands, *window), activation)


def _float_conv(
    x: Any,
    weight: Any,
    bias: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    functions: list[str],
    numbers: list[float],
    contiguous: bool = False,
) -> Any:
    del contiguous
    how = (stride, padding, dilation, False, [0] * len(stride), groups)
    found = torch.ops.aten.convolution.default(x, weight, bias, *how)
    return functions_of(found, functions, numbers)


def _float_conv_codes(*operands: Any) -> Any:
    *of_floats, scale, zero_point = operands
    return _codes(_float_conv(*of_floats), scale, zero_point)


def _activated(out: Any, activation: str | None) -> Any:
    return out if activation is None else ACTIVATIONS[activation](out)


def _linear(
    x: Any, weight: Any, scales: Any, bias: Any, x_scale: float, x_zp: int, *out: Any, **more: Any
) -> Any:
    result = _product(_real(x, x_scale, x_zp), weight, scales)
    if bias is not None:
        result = result + _bias(bias, scales, x_scale)
    return _finished(-1, result, *out, **more)


def _product(x: Any, weight: Any, weight_scales: Any) -> Any:
    return x @ _weight(weight.t(), weight_scales, 1)


def _linear_real(
    x: Any,
    weight: Any,
    weight_scale: Any,
    bias: Any,
    x_scale: float,
    x_zp: int,
    activation: str | None = None,
) -> Any:
    out = _product(_real(x, x_scale, x_zp), weight, weight_scale)
    return _activated(out if bias is None else out + bias, activation)


def _linear_dynamic(
    x: Any, weight: Any, weight_scale: Any, bias: Any = None, activation: str | None = None
) -> Any:
    codes, scale, zero_point = row_codes(x.reshape(-1, weight.shape[1]))
    # ONNX has one zero point for all rows: what those of ours take off is one product a row.
    offset = zero_point.to(torch.int32) * weight.to(torch.int32).sum(1, dtype=torch.int32)
    sums = int_product(codes.to(torch.uint8), weight.t()) - offset
    out = sums.float() * (scale * weight_scale)
    out = _activated(out if bias is None else out + bias, activation)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _add(
    a: Any, b: Any, a_scale: float, a_zp: int, b_scale: float, b_zp: int, *out: Any, **more: Any
) -> Any:
    return _codes(_real(a, a_scale, a_zp) + _real(b, b_scale, b_zp), *out, **more)


def _mul(
    a: Any, b: Any, a_scale: float, a_zp: int, b_scale: float, b_zp: int, *out: Any, **more: Any
) -> Any:
    return _codes(_real(a, a_scale, a_zp) * _real(b, b_scale, b_zp), *out, **more)


def _affine(
    x: Any,
    scale: Any,
    shift: Any,
    axis: int,
    x_scale: float,
    x_zp: int,
    *out: Any,
    **more: Any,
) -> Any:
    shape = [1] * x.dim()
    shape[axis] = -1
    real = _real(x, x_scale, x_zp) * scale.reshape(shape) + shift.reshape(shape)
    return _codes(real, *out, **more)


def _requantize(x: Any, x_scale: float, x_zp: int, out_scale: float, out_zp: int) -> Any:
    return _codes(_real(x, x_scale, x_zp), out_scale, out_zp)


def _max_pool(
    x: Any,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil: bool,
) -> Any:
    # The codes are ordered as what they stand for is: any scale will do.
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    return _codes(pool(_real(x, 1.0, 0), kernel, stride, padding, dilation, ceil), 1.0, 0)


def _avg_pool(
    x: Any,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
    count_include_pad: bool,
    x_scale: float,
    x_zp: int,
    *out: Any,
    **more: Any,
) -> Any:
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    mean = pool(_real(x, x_scale, x_zp), kernel, stride, padding, ceil, count_include_pad)
    return _codes(mean, *out, **more)


def _adaptive_avg_pool(
    x: Any, output_size: Sequence[int], x_scale: float, x_zp: int, *out: Any, **more: Any
) -> Any:
    real, dims = _real(x, x_scale, x_zp), len(output_size)
    if all(size == 1 for size in output_size):
        return _codes(real.mean(tuple(range(2, 2 + dims)), keepdim=True), *out, **more)
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]
    sizes = [n if n >= 0 else now for n, now in zip(output_size, x.shape[2:], strict=True)]
    return _codes(pool(real, sizes), *out, **more)


def _cat(
    xs: list[Any], dim: int, scales: list[float], zero_points: list[int], *out: Any, **more: Any
) -> Any:
    reals = [_real(*one) for one in zip(xs, scales, zero_points, strict=True)]
    return _codes(torch.cat(reals, dim), *out, **more)


def _upsample(
    x: Any,
    size: Any,
    scale_factor: Any,
    mode: str,
    align_corners: bool | None,
    x_scale: float,
    x_zp: int,
    *out: Any,
    **more: Any,
) -> Any:
    real = F.interpolate(_real(x, x_scale, x_zp), size, scale_factor, mode, align_corners)
    return _codes(real, *out, **more)
