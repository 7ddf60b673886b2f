"""Transformer layers between floats and *row codes*: each row quantized on its own, once.

Row codes stand for a float32 tensor ``x`` [..., K] and are three tensors: ``codes`` uint8
[..., K], ``scale`` float32 [...] and ``zero_point`` int32 [...], so that about
``x = (codes - zero_point) * scale``. They are the numbers that ``linear_dynamic`` makes of each
row by itself (see ``ops/dynamic.py``), so for all products::

    linear_rows(*quantize_rows(x), ...)  ==  linear_dynamic(x, ...)            bit for bit

The other ops are what stands between two products in a transformer, in one pass over the rows::

    linear_rows_rows(...)  =  quantize_rows(linear_rows(...))
    gated_rows_rows(...)   =  quantize_rows(activation(linear_rows(gate)) * linear_rows(up))
    linear_rows_norm(...)  =  norm_rows(linear_rows(...), residual, ...)
    norm_rows(x, residual) :  total  = x + residual
                              normed = layer_norm(total) or rms_norm(total)
                              codes  = quantize_rows(normed)

A row that is not finite has the scale NaN, and gives NaN in whatever reads it. Means, variances and
quotients may be summed in any order, so normed values and their codes are equal within rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.errors import InvalidInputError
from x86quant.ops._register import register
from x86quant.ops.dynamic import check_activation, check_weight, row_codes, row_product

RowCodes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NormResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

ROW_CODES = "Tensor codes, Tensor scale, Tensor zero_point"
THREE = "(Tensor codes, Tensor scale, Tensor zero_point)"
_WEIGHTS = "Tensor weight, Tensor weight_scale, Tensor? bias=None"
_NORM = "Tensor? norm_weight, Tensor? norm_bias, float eps, str kind, int outputs"
_FIVE = "(Tensor total, Tensor normed, Tensor codes, Tensor scale, Tensor zero_point)"

#: Bits of ``outputs``: which results of a norm are wanted. The others are empty tensors.
TOTAL, NORMED, CODES = 1, 2, 4
#: The norms, by the name in ``kind``.
NORM_KINDS = ("layer", "rms")


# --- the ops ---


def _quantize_rows_fake(x: torch.Tensor) -> RowCodes:
    check_floats("quantize_rows", x=x)
    return new_row_codes(x, x.shape)


def _quantize_rows_native(x: torch.Tensor) -> RowCodes:
    from x86quant.packing.linear_dynamic import extension_loads  # the ops alone need no kernels

    check_floats("quantize_rows", x=x)
    if not extension_loads():
        return quantize_rows(x)
    out: RowCodes = torch.ops.x86quant.native_quantize_rows(x)
    return out


@register("Tensor x", cpu=_quantize_rows_native, fake=_quantize_rows_fake, returns=THREE)
def quantize_rows(x: torch.Tensor) -> RowCodes:
    """Row codes of float32 ``x`` [..., K]."""
    check_floats("quantize_rows", x=x)
    codes, scale, zero_point = row_codes(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
    return (
        codes.to(torch.uint8).reshape(x.shape),
        scale.reshape(x.shape[:-1]),
        zero_point.to(torch.int32).reshape(x.shape[:-1]),
    )


def _linear_rows_fake(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    _check_linear("linear_rows", codes, scale, zero_point, weight, weight_scale, bias)
    check_activation("linear_rows", activation)
    return scale.new_empty((*codes.shape[:-1], weight.shape[0]))


def _linear_rows_packed(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    from x86quant.packing.row_linears import row_linear  # the ops alone need no kernels

    _check_linear("linear_rows", codes, scale, zero_point, weight, weight_scale, bias)
    check_activation("linear_rows", activation)
    pack = row_linear((weight, weight_scale, bias), activation)
    if pack is None:
        return linear_rows(codes, scale, zero_point, weight, weight_scale, bias, activation)
    out: torch.Tensor = pack.floats(codes, scale, zero_point)
    return out


@register(
    f"{ROW_CODES}, {_WEIGHTS}, str? activation=None",
    cpu=_linear_rows_packed,
    fake=_linear_rows_fake,
)
def linear_rows(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Row codes [..., K] times the transpose of int8 ``weight`` [N, K]: float32 [..., N]."""
    _check_linear("linear_rows", codes, scale, zero_point, weight, weight_scale, bias)
    check_activation("linear_rows", activation)
    out = row_product(
        codes.reshape(math.prod(codes.shape[:-1]), weight.shape[1]),
        scale.reshape(-1, 1),
        zero_point.reshape(-1, 1),
        weight,
        weight_scale,
        bias,
        activation,
    )
    return out.reshape(*codes.shape[:-1], weight.shape[0])


def _linear_rows_rows_fake(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> RowCodes:
    _check_linear("linear_rows_rows", codes, scale, zero_point, weight, weight_scale, bias)
    check_activation("linear_rows_rows", activation)
    return new_row_codes(scale, (*codes.shape[:-1], weight.shape[0]))


def _linear_rows_rows_packed(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> RowCodes:
    from x86quant.packing.row_linears import row_linear  # the ops alone need no kernels

    _check_linear("linear_rows_rows", codes, scale, zero_point, weight, weight_scale, bias)
    check_activation("linear_rows_rows", activation)
    pack = row_linear((weight, weight_scale, bias), activation)
    if pack is None:
        return linear_rows_rows(codes, scale, zero_point, weight, weight_scale, bias, activation)
    out: RowCodes = pack.codes(codes, scale, zero_point)
    return out


@register(
    f"{ROW_CODES}, {_WEIGHTS}, str? activation=None",
    cpu=_linear_rows_rows_packed,
    fake=_linear_rows_rows_fake,
    returns=THREE,
)
def linear_rows_rows(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> RowCodes:
    """``linear_rows`` with its result quantized row by row for the next product."""
    _check_linear("linear_rows_rows", codes, scale, zero_point, weight, weight_scale, bias)
    check_activation("linear_rows_rows", activation)
    return quantize_rows(
        linear_rows(codes, scale, zero_point, weight, weight_scale, bias, activation)
    )


def _gated_rows_rows_fake(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_scale: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor | None,
    activation: str,
) -> RowCodes:
    op = "gated_rows_rows"
    _check_linear(op, codes, scale, zero_point, gate_weight, gate_scale, gate_bias)
    _check_linear(op, codes, scale, zero_point, up_weight, up_scale, up_bias)
    check_activation(op, activation)
    if gate_weight.shape[0] != up_weight.shape[0]:
        raise InvalidInputError(
            f"x86quant::{op}: gate_weight and up_weight must have equally many output features, "
            f"got {gate_weight.shape[0]} and {up_weight.shape[0]}"
        )
    return new_row_codes(scale, (*codes.shape[:-1], up_weight.shape[0]))


def _gated_rows_rows_packed(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_scale: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor | None,
    activation: str,
) -> RowCodes:
    from x86quant.packing.row_linears import gated_rows  # the ops alone need no kernels

    given = (codes, scale, zero_point)
    gate = (gate_weight, gate_scale, gate_bias)
    up = (up_weight, up_scale, up_bias)
    _gated_rows_rows_fake(*given, *gate, *up, activation)  # it checks
    pack = gated_rows(gate, up, activation)
    if pack is None:
        return gated_rows_rows(*given, *gate, *up, activation)
    out: RowCodes = pack.codes(*given)
    return out


@register(
    f"{ROW_CODES}, Tensor gate_weight, Tensor gate_scale, Tensor? gate_bias, "
    "Tensor up_weight, Tensor up_scale, Tensor? up_bias, str activation",
    cpu=_gated_rows_rows_packed,
    fake=_gated_rows_rows_fake,
    returns=THREE,
)
def gated_rows_rows(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_scale: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor | None,
    activation: str,
) -> RowCodes:
    """Row codes of ``activation(gate) * up``, where both are products of the same rows."""
    given = (codes, scale, zero_point)
    gate = (gate_weight, gate_scale, gate_bias)
    up = (up_weight, up_scale, up_bias)
    _gated_rows_rows_fake(*given, *gate, *up, activation)  # it checks
    return quantize_rows(linear_rows(*given, *gate, activation) * linear_rows(*given, *up))


def _linear_rows_norm_fake(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> NormResult:
    op = "linear_rows_norm"
    _check_linear(op, codes, scale, zero_point, weight, weight_scale, bias)
    shape = (*codes.shape[:-1], weight.shape[0])
    _check_norm(op, shape, residual, norm_weight, norm_bias, eps, kind, outputs)
    return _new_norm_result(scale, shape, outputs)


def _linear_rows_norm_packed(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> NormResult:
    from x86quant.packing.row_linears import row_linear  # the ops alone need no kernels

    op = "linear_rows_norm"
    _check_linear(op, codes, scale, zero_point, weight, weight_scale, bias)
    shape = (*codes.shape[:-1], weight.shape[0])
    _check_norm(op, shape, residual, norm_weight, norm_bias, eps, kind, outputs)
    given = (codes, scale, zero_point)
    norm: tuple[Any, ...] = (residual, norm_weight, norm_bias, eps, kind, outputs)
    pack = row_linear((weight, weight_scale, bias), None)
    if pack is None:
        return linear_rows_norm(*given, weight, weight_scale, bias, *norm)
    out: NormResult = pack.normed(*given, *norm)
    return out


@register(
    f"{ROW_CODES}, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual, {_NORM}",
    cpu=_linear_rows_norm_packed,
    fake=_linear_rows_norm_fake,
    returns=_FIVE,
)
def linear_rows_norm(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> NormResult:
    """``norm_rows`` of ``linear_rows``: the product, plus ``residual``, normed and quantized."""
    op = "linear_rows_norm"
    _check_linear(op, codes, scale, zero_point, weight, weight_scale, bias)
    shape = (*codes.shape[:-1], weight.shape[0])
    _check_norm(op, shape, residual, norm_weight, norm_bias, eps, kind, outputs)
    total = linear_rows(codes, scale, zero_point, weight, weight_scale, bias)
    if residual is not None:
        total = total + residual
    return _normed(total, norm_weight, norm_bias, eps, kind, outputs)


def _norm_rows_fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> NormResult:
    check_floats("norm_rows", x=x)
    _check_norm("norm_rows", x.shape, residual, norm_weight, norm_bias, eps, kind, outputs)
    if outputs & TOTAL and residual is None:
        raise InvalidInputError(
            "x86quant::norm_rows: without a residual the total is x itself; do not ask for it"
        )
    return _new_norm_result(x, x.shape, outputs)


def _norm_rows_native(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> NormResult:
    from x86quant.packing.linear_dynamic import extension_loads  # the ops alone need no kernels

    operands = (x, residual, norm_weight, norm_bias, eps, kind, outputs)
    _norm_rows_fake(*operands)  # it checks
    if x.numel() == 0 or not extension_loads():
        return norm_rows(*operands)
    out: NormResult = torch.ops.x86quant.native_norm_rows(*operands)
    return out


@register(
    f"Tensor x, Tensor? residual, {_NORM}",
    cpu=_norm_rows_native,
    fake=_norm_rows_fake,
    returns=_FIVE,
)
def norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> NormResult:
    """The norm of ``x`` [..., N] plus ``residual``, over the last dimension, and its row codes."""
    _norm_rows_fake(x, residual, norm_weight, norm_bias, eps, kind, outputs)  # it checks
    total = x if residual is None else x + residual
    return _normed(total, norm_weight, norm_bias, eps, kind, outputs)


# --- arithmetic and checks ---


def _normed(
    total: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> NormResult:
    if kind == "layer":
        normed = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    else:
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
        normed = normed if weight is None else normed * weight
        normed = normed if bias is None else normed + bias
    codes, scale, zero_point = (
        quantize_rows(normed) if outputs & CODES else _new_row_codes_unread(total)
    )
    return (
        total.contiguous() if outputs & TOTAL else total.new_empty(0),
        normed.contiguous() if outputs & NORMED else total.new_empty(0),
        codes,
        scale,
        zero_point,
    )


def new_row_codes(like: torch.Tensor, shape: tuple[int, ...] | torch.Size) -> RowCodes:
    """Empty row codes of values of ``shape``, where float32 ``like`` is."""
    return (
        like.new_empty(shape, dtype=torch.uint8),
        like.new_empty(shape[:-1]),
        like.new_empty(shape[:-1], dtype=torch.int32),
    )


def _new_row_codes_unread(like: torch.Tensor) -> RowCodes:
    return (
        like.new_empty(0, dtype=torch.uint8),
        like.new_empty(0),
        like.new_empty(0, dtype=torch.int32),
    )


def _new_norm_result(
    like: torch.Tensor, shape: tuple[int, ...] | torch.Size, outputs: int
) -> NormResult:
    return (
        like.new_empty(shape if outputs & TOTAL else (0,)),
        like.new_empty(shape if outputs & NORMED else (0,)),
        *(new_row_codes(like, shape) if outputs & CODES else _new_row_codes_unread(like)),
    )


def check_floats(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise InvalidInputError unless all given tensors are rows of float32."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.float32:
            raise InvalidInputError(
                f"x86quant::{op}: {name} must be float32, got {tensor.dtype}; "
                f"convert it with {name}.float()"
            )
        if tensor.dim() == 0:
            raise InvalidInputError(f"x86quant::{op}: {name} must have a dimension, it is a number")


def _check_linear(
    op: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    check_weight(op, weight, weight_scale, bias)
    if codes.dtype != torch.uint8:
        raise InvalidInputError(
            f"x86quant::{op}: codes must be uint8, got {codes.dtype}; "
            "make them with x86quant::quantize_rows"
        )
    if codes.dim() == 0 or codes.shape[-1] != weight.shape[1]:
        raise InvalidInputError(
            f"x86quant::{op}: expected {weight.shape[1]} input features, "
            f"got codes of shape {tuple(codes.shape)}"
        )
    for name, tensor, dtype in (
        ("scale", scale, torch.float32),
        ("zero_point", zero_point, torch.int32),
    ):
        if tensor.dtype != dtype or tensor.shape != codes.shape[:-1]:
            raise InvalidInputError(
                f"x86quant::{op}: {name} must be {dtype} of shape {tuple(codes.shape[:-1])}, one "
                f"a row of codes, got {tensor.dtype} {tuple(tensor.shape)}"
            )


def _check_norm(
    op: str,
    shape: tuple[int, ...] | torch.Size,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> None:
    check_floats(op, residual=residual)
    if residual is not None and residual.shape != torch.Size(shape):
        raise InvalidInputError(
            f"x86quant::{op}: the residual has shape {tuple(residual.shape)}, "
            f"what it is added to {tuple(shape)}; they must be equal"
        )
    for name, tensor in (("norm_weight", weight), ("norm_bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.shape != torch.Size(shape[-1:]):
            raise InvalidInputError(
                f"x86quant::{op}: {name} must be float32 of shape {tuple(shape[-1:])}, one a "
                f"feature, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if not (math.isfinite(eps) and eps >= 0):
        raise InvalidInputError(f"x86quant::{op}: eps must be finite and at least 0, got {eps}")
    if kind not in NORM_KINDS:
        raise InvalidInputError(
            f"x86quant::{op}: unknown kind of norm {kind!r}; use one of {', '.join(NORM_KINDS)}"
        )
    if not 0 < outputs <= TOTAL | NORMED | CODES:
        raise InvalidInputError(
            f"x86quant::{op}: outputs is a sum of {TOTAL} (total), {NORMED} (normed) and "
            f"{CODES} (codes), got {outputs}"
        )
