"""Convolution of floats, for layers that stay in float beside int8 ones, and what follows it.

``functions`` are names from ``FUNCTIONS`` and ``numbers`` one number for each. The first one reads
the convolution's result, each of the others what the one before gave: ``y``. ``x`` is the result
itself, or what the last function ``x`` was given::

    add  y + number     least  number where y is less     sigmoid  tanh     times_x  y * x
    mul  y * number     most   number where y is more     x        from here on, x is y

``float_conv_codes`` quantizes what they give.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._numerics import channels_last
from x86quant.ops._register import OUT_QPARAMS, register
from x86quant.ops.quantization import quantize

#: Names of functions, in the order of the native ones (``kernels/native/float_products.h``).
FUNCTIONS = ("add", "mul", "least", "most", "sigmoid", "tanh", "times_x", "x")

_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
    "int groups, str[] functions, float[] numbers"
)


def check_functions(functions: list[str], numbers: list[float]) -> None:
    """Raise what is wrong with them."""
    unknown = sorted(set(functions) - set(FUNCTIONS))
    if unknown or len(functions) != len(numbers):
        wrong = f"got {unknown[0]!r}" if unknown else f"got {len(numbers)} numbers"
        raise InvalidInputError(
            f"x86quant::float_conv: functions are some of {FUNCTIONS} with a number each, {wrong}"
        )
    if not all(map(math.isfinite, numbers)):
        raise InvalidInputError("x86quant::float_conv: its numbers must be finite")


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    functions: list[str],
    numbers: list[float],
) -> None:
    check_functions(functions, numbers)
    floats = all(t is None or t.dtype == torch.float32 for t in (x, weight, bias))
    if not floats or weight.dim() not in (3, 4, 5):
        raise InvalidInputError(
            "x86quant::float_conv: expected float32 tensors and a weight [out, C / groups, "
            f"*kernel], got a weight {tuple(weight.shape)} of {weight.dtype} and an x of {x.dtype}"
        )
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * groups:
        raise InvalidInputError(
            f"x86quant::float_conv: expected {weight.dim()} dimensions, "
            f"{weight.shape[1] * groups} channels among them, got shape {tuple(x.shape)}"
        )


@register(f"{_ARGUMENTS}, bool contiguous=False", checks=[_check])
def float_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    functions: list[str],
    numbers: list[float],
    contiguous: bool = False,
) -> torch.Tensor:
    """``functions`` of the convolution of ``x`` [N, C, *spatial]; channels last or contiguous."""
    how: Any = (stride, padding, dilation, False, [0] * len(stride), groups)
    found = functions_of(torch.ops.aten.convolution(x, weight, bias, *how), functions, numbers)
    return found.contiguous() if contiguous else channels_last(found)


@register(f"{_ARGUMENTS}, {OUT_QPARAMS}", checks=[_check])
def float_conv_codes(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    functions: list[str],
    numbers: list[float],
    out_scale: float,
    out_zp: int,
) -> torch.Tensor:
    """The codes of ``float_conv``."""
    found = float_conv(x, weight, bias, stride, padding, dilation, groups, functions, numbers)
    return quantize(found, out_scale, out_zp)


def functions_of(x: torch.Tensor, functions: list[str], numbers: list[float]) -> torch.Tensor:
    """``functions`` of ``x``, one after the other."""
    y = x
    for name, number in zip(functions, numbers, strict=True):
        if name == "add":
            y = y + number
        elif name == "mul":
            y = y * number
        elif name == "least":
            y = y.clamp(min=number)
        elif name == "most":
            y = y.clamp(max=number)
        elif name == "sigmoid":
            y = torch.sigmoid(y)
        elif name == "tanh":
            y = torch.tanh(y)
        elif name == "times_x":
            y = y * x
        else:
            x = y
    return y
