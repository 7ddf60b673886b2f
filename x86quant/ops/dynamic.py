"""Linears on float tensors: int8 activations chosen row by row, or int8 weights alone.

``linear_dynamic`` quantizes each row of K floats on its own, to uint8, in float32 arithmetic::

    low, high = min(row, 0), max(row, 0)
    scale = max(float((double(high) - low) / 255), least normal float)
    inv   = 1 / scale
    zp    = clamp(round(-low * inv), 0, 255)
    code  = clamp(round(row * inv) + zp, 0, 255)                       half to even
    v     = fma(float(sum((code - zp) * weight)), scale * weight_scale, bias)
    out   = activation(v)

The sum is an exact int32. A row that holds NaN or infinity gives NaN throughout: it has no range.
Rows do not see each other, so a batch gives what its rows give one by one.

Weights may have scales for groups of input features, and codes of 4 bits: see ``ops/groups.py``.

``linear_weight_only`` keeps the activations as they are::

    out = activation(sum(x * weight) * weight_scale + bias)            float32, in any order
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant import extension
from x86quant.errors import InvalidInputError
from x86quant.ops._register import register
from x86quant.ops.groups import check_groups, group_product, real_product
from x86quant.weight_form import features_of, has_groups

ARGUMENTS = "Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None, str? activation=None"

#: What may be fused behind a linear, by name.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

_CODE_MAX = 255
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def row_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, K], scales [rows, 1] and zero points [rows, 1] of ``x`` [rows, K].

    Codes and zero points are whole numbers in float32. A scale is NaN where a row is not finite.
    """
    zero = x.new_zeros((x.shape[0], 1))
    low = torch.cat([zero, x], 1).amin(1, keepdim=True)
    high = torch.cat([zero, x], 1).amax(1, keepdim=True)
    width = (high.double() - low.double()) / _CODE_MAX
    scale = width.to(torch.float32).clamp(min=_LEAST_SCALE)
    inverse = 1 / scale
    zero_point = torch.round(-low * inverse).clamp(0, _CODE_MAX)
    codes = (torch.round(x * inverse) + zero_point).clamp(0, _CODE_MAX)
    finite = torch.isfinite(low) & torch.isfinite(high)
    return (
        torch.where(finite, codes, 0),
        torch.where(finite, scale, torch.nan),
        torch.where(finite, zero_point, 0),
    )


def row_product(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """What :func:`row_codes` gives times the transpose of ``weight`` [N, K]: [rows, N]."""
    if has_groups(weight_scale):
        act = None if activation is None else ACTIVATIONS[activation]
        return group_product(codes, scale, zero_point, weight, weight_scale, bias, act)
    # float64 holds every int32 sum exactly.
    sums = (codes.double() - zero_point.double()) @ weight.double().t()
    return finished_sums(sums, scale * weight_scale, bias, activation)


def finished_sums(
    sums: torch.Tensor, steps: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """What a product gives of its exact sums [..., N]; ``steps`` is what 1 of each stands for."""
    # float64 holds the product of two float32.
    v = sums.to(torch.float32).double() * steps.double()
    if bias is not None:
        v = v + bias.double()
    out = v.to(torch.float32)
    return out if activation is None else ACTIVATIONS[activation](out)


def check_operands(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> None:
    """Raise InvalidInputError unless the operands of a float linear fit each other."""
    check_weight(op, weight, weight_scale, bias)
    check_activation(op, activation)
    if x.dtype != torch.float32:
        raise InvalidInputError(
            f"x86quant::{op}: x must be float32, got {x.dtype}; convert it with x.float()"
        )
    if x.dim() == 0 or x.shape[-1] != features_of(weight):
        raise InvalidInputError(
            f"x86quant::{op}: expected {features_of(weight)} input features, "
            f"got shape {tuple(x.shape)}"
        )


def check_weight(
    op: str, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise InvalidInputError unless the constant operands of a float linear fit each other."""
    if has_groups(weight_scale):
        check_groups(op, weight, weight_scale)
    elif weight.dtype != torch.int8 or weight.dim() != 2:
        raise InvalidInputError(
            f"x86quant::{op}: weight must be int8 of shape [out, in], "
            f"got {weight.dtype} {tuple(weight.shape)}"
        )
    for name, tensor in (("weight_scale", weight_scale), ("bias", bias)):
        if tensor is None or (tensor is weight_scale and has_groups(weight_scale)):
            continue
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != (weight.shape[0],):
            raise InvalidInputError(
                f"x86quant::{op}: {name} must be float32 of shape ({weight.shape[0]},), one an "
                f"output feature, got {tensor.dtype} {tuple(tensor.shape)}"
            )


def check_activation(op: str, activation: str | None) -> None:
    """Raise InvalidInputError unless ``activation`` names one that can be fused."""
    if activation is not None and activation not in ACTIVATIONS:
        raise InvalidInputError(
            f"x86quant::{op}: unknown activation {activation!r}; use one of "
            f"{', '.join(ACTIVATIONS)}, or None"
        )


def _linear_dynamic_packed(x: torch.Tensor, *constant: Any) -> torch.Tensor | None:
    """``linear_dynamic`` by weights that were packed when they were first seen."""
    from x86quant.packing.linear_dynamic import cached_pack  # the ops alone need no kernels

    pack = cached_pack(*constant)
    return None if pack is None else pack.run(x)


def _result(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Arithmetic on rows would ask exporters whether there is only one."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@register(ARGUMENTS, checks=[check_operands], shapes=_result, native=_linear_dynamic_packed)
def linear_dynamic(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """``x`` [..., K], quantized row by row, times the transpose of ``weight`` [N, K]."""
    rows = x.reshape(math.prod(x.shape[:-1]), features_of(weight))
    codes, scale, zero_point = row_codes(rows)
    out = row_product(codes, scale, zero_point, weight, weight_scale, bias, activation)
    return out.reshape(*x.shape[:-1], weight.shape[0])


#: Up to as many rows the native kernel, which reads int8, beats a float product.
_FEW_ROWS = 16


def _linear_weight_only_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor | None:
    """``linear_weight_only`` with the weight read as int8 where there are few rows."""
    from x86quant.packing.linear_dynamic import extension_loads  # the ops alone need no kernels

    rows = math.prod(x.shape[:-1])
    if not 0 < rows <= _FEW_ROWS or has_groups(weight_scale) or not extension_loads():
        return None
    flat = x.reshape(rows, weight.shape[1])
    out: torch.Tensor = extension.native().weight_only_rows(
        flat, weight, weight_scale, bias, activation or ""
    )
    return out.reshape(*x.shape[:-1], weight.shape[0])


@register(ARGUMENTS, checks=[check_operands], shapes=_result, native=_linear_weight_only_few)
def linear_weight_only(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """``x`` [..., K] times the transpose of int8 ``weight`` [N, K], summed in float32."""
    if has_groups(weight_scale):
        out = real_product(x, weight, weight_scale, None)
    else:
        out = F.linear(x, weight.to(x.dtype)) * weight_scale
    if bias is not None:
        out = out + bias
    return out if activation is None else ACTIVATIONS[activation](out)
