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

from x86quant import extension
from x86quant.errors import InvalidInputError
from x86quant.ops._register import register
from x86quant.ops.dynamic import check_activation, check_weight, row_codes, row_product
from x86quant.weight_form import features_of

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


def _quantize_rows_native(x: torch.Tensor) -> RowCodes | None:
    from x86quant.packing.linear_dynamic import extension_loads  # the ops alone need no kernels

    return extension.native().native_quantize_rows(x) if extension_loads() else None


@register(
    "Tensor x",
    checks=[lambda op, x: check_floats(op, x=x)],
    shapes=lambda x: new_row_codes(x, x.shape),
    native=_quantize_rows_native,
    returns=THREE,
)
def quantize_rows(x: torch.Tensor) -> RowCodes:
    """Row codes of float32 ``x`` [..., K]."""
    codes, scale, zero_point = row_codes(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
    return (
        codes.to(torch.uint8).reshape(x.shape),
        scale.reshape(x.shape[:-1]),
        zero_point.to(torch.int32).reshape(x.shape[:-1]),
    )


def _check_order(op: str, codes: torch.Tensor, order: torch.Tensor) -> None:
    if codes.dtype != torch.uint8 or codes.dim() == 0:
        raise InvalidInputError(
            f"x86quant::{op}: codes must be uint8 [..., features], "
            f"got {codes.dtype} {tuple(codes.shape)}"
        )
    if order.dtype != torch.int32 or order.shape != codes.shape[-1:]:
        raise InvalidInputError(
            f"x86quant::{op}: order must be int32 of {codes.shape[-1]} numbers, one a feature, "
            f"got {order.dtype} {tuple(order.shape)}"
        )


@register(
    "Tensor codes, Tensor order",
    checks=[_check_order],
    shapes=lambda codes: codes.new_empty(codes.shape),
)
def reorder_codes(codes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Row codes [..., K] whose feature k is feature ``order[k]`` of ``codes``.

    Scales and zero points of rows are the same in any order.
    """
    return codes.index_select(-1, order)


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
    if codes.dim() == 0 or codes.shape[-1] != features_of(weight):
        raise InvalidInputError(
            f"x86quant::{op}: expected {features_of(weight)} input features, "
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


def _pack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = None,
) -> Any:
    from x86quant.packing.linear_dynamic import row_linear  # the ops alone need no kernels

    return row_linear((weight, weight_scale, bias), activation)


def _linear_rows_packed(*given: Any) -> torch.Tensor | None:
    pack = _pack(*given[3:])
    return None if pack is None else pack.floats(*given[:3])


@register(
    f"{ROW_CODES}, {_WEIGHTS}, str? activation=None",
    checks=[_check_linear, check_activation],
    shapes=lambda codes, scale, weight: scale.new_empty((*codes.shape[:-1], weight.shape[0])),
    native=_linear_rows_packed,
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
    out = row_product(
        codes.reshape(math.prod(codes.shape[:-1]), features_of(weight)),
        scale.reshape(-1, 1),
        zero_point.reshape(-1, 1),
        weight,
        weight_scale,
        bias,
        activation,
    )
    return out.reshape(*codes.shape[:-1], weight.shape[0])


def _linear_rows_rows_packed(*given: Any) -> RowCodes | None:
    pack = _pack(*given[3:])
    return None if pack is None else pack.codes(*given[:3])


@register(
    f"{ROW_CODES}, {_WEIGHTS}, str? activation=None",
    checks=[_check_linear, check_activation],
    shapes=lambda codes, scale, weight: new_row_codes(scale, (*codes.shape[:-1], weight.shape[0])),
    native=_linear_rows_rows_packed,
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
    return quantize_rows(
        linear_rows(codes, scale, zero_point, weight, weight_scale, bias, activation)
    )


def _check_gated(
    op: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_scale: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor | None,
) -> None:
    _check_linear(op, codes, scale, zero_point, gate_weight, gate_scale, gate_bias)
    _check_linear(op, codes, scale, zero_point, up_weight, up_scale, up_bias)
    if gate_weight.shape[0] != up_weight.shape[0]:
        raise InvalidInputError(
            f"x86quant::{op}: gate_weight and up_weight must have equally many output features, "
            f"got {gate_weight.shape[0]} and {up_weight.shape[0]}"
        )


def _gated_rows_rows_packed(*given: Any) -> RowCodes | None:
    from x86quant.packing.linear_dynamic import gated_rows  # the ops alone need no kernels

    pack = gated_rows(given[3:6], given[6:9], given[9])
    return None if pack is None else pack.codes(*given[:3])


@register(
    f"{ROW_CODES}, Tensor gate_weight, Tensor gate_scale, Tensor? gate_bias, "
    "Tensor up_weight, Tensor up_scale, Tensor? up_bias, str activation",
    checks=[_check_gated, check_activation],
    shapes=lambda codes, scale, up_weight: new_row_codes(
        scale, (*codes.shape[:-1], up_weight.shape[0])
    ),
    native=_gated_rows_rows_packed,
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
    gate = linear_rows(*given, gate_weight, gate_scale, gate_bias, activation)
    return quantize_rows(gate * linear_rows(*given, up_weight, up_scale, up_bias))


def _check_linear_norm(
    op: str,
    codes: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> None:
    shape = (*codes.shape[:-1], weight.shape[0])
    _check_norm(op, shape, residual, norm_weight, norm_bias, eps, kind, outputs)


def _linear_rows_norm_packed(*given: Any) -> NormResult | None:
    pack = _pack(*given[3:6])
    return None if pack is None else pack.normed(*given[:3], *given[6:])


@register(
    f"{ROW_CODES}, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual, {_NORM}",
    checks=[_check_linear, _check_linear_norm],
    shapes=lambda codes, scale, weight, outputs: _new_norm_result(
        scale, (*codes.shape[:-1], weight.shape[0]), outputs
    ),
    native=_linear_rows_norm_packed,
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
    total = linear_rows(codes, scale, zero_point, weight, weight_scale, bias)
    if residual is not None:
        total = total + residual
    return _normed(total, norm_weight, norm_bias, eps, kind, outputs)


def _check_norm_rows(
    op: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    eps: float,
    kind: str,
    outputs: int,
) -> None:
    check_floats(op, x=x)
    _check_norm(op, x.shape, residual, norm_weight, norm_bias, eps, kind, outputs)
    if outputs & TOTAL and residual is None:
        raise InvalidInputError(
            f"x86quant::{op}: without a residual the total is x itself; do not ask for it"
        )


def _norm_rows_native(*given: Any) -> NormResult | None:
    from x86quant.packing.linear_dynamic import extension_loads  # the ops alone need no kernels

    if given[0].numel() == 0 or not extension_loads():
        return None
    out: NormResult = extension.native().native_norm_rows(*given)
    return out


@register(
    f"Tensor x, Tensor? residual, {_NORM}",
    checks=[_check_norm_rows],
    shapes=lambda x, outputs: _new_norm_result(x, x.shape, outputs),
    native=_norm_rows_native,
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
