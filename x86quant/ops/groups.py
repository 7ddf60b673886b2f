"""Weights with scales of their own for groups of input features: of 4 bits, or of 8.

Wherever an op takes the weight of a linear it takes one of these as well, told by their types:

========  =======================================  ==============================================
bits      weight                                   weight_scale
========  =======================================  ==============================================
8, plain  int8 [N, K]                              float32 [N]
8         int8 [N, K]                              float16 or float32 [N, G] or [N, G, 2]
4         uint8 [N, K / 2], two codes a byte       float16 or float32 [N, G] or [N, G, 2]
========  =======================================  ==============================================

A group is ``K / G`` input features side by side, a multiple of 8. Of 4 bits byte ``j`` holds
feature ``2 j`` in its low half and ``2 j + 1`` in its high half, each as a number from 0 to 15 that
stands for itself less 8. With a last dimension of 2 a group has a scale and an offset, so that

    real = scale * code + offset

where the offset of a zero point ``z`` is ``-scale * z``. With row codes of an input the product is,
group after group, in float32::

    sum_g = sum of code * weight code over the features of a group        an exact int32
    v     = fma(float(sum_g), scale_g, v)
    v     = fma(float(sum of the group's codes), offset_g, v)              only with offsets
    v     = fma(-zero_point, total, v)                                     after the last group
    out   = activation(fma(v, scale, bias))

``total`` is what the real weights of an output feature add up to, summed in float64, as float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.errors import InvalidInputError
from x86quant.weight_form import features_of, has_groups

#: What a code of 4 bits counts from.
ZERO = 8
#: Groups are multiples of so many features, since kernels read two times four codes at once.
GROUP_STEP = 8
#: More groups of a row than kernels keep the sums of.
MOST_GROUPS = 2048


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes from -8 to 7 [N, K], two a byte: uint8 [N, K / 2]."""
    shifted = (codes + ZERO).to(torch.uint8)
    return shifted[:, ::2] | shifted[:, 1::2] << 4


def fit_nibbles(codes: torch.Tensor) -> bool:
    """Whether int8 ``codes`` are all from -8 to 7."""
    return bool((codes >= -ZERO).all()) and bool((codes < ZERO).all())


def codes_of(weight: torch.Tensor) -> torch.Tensor:
    """The codes of ``weight`` as int8 [N, K]."""
    if weight.dtype != torch.uint8:
        return weight
    both = torch.stack([weight & 15, weight >> 4], -1).flatten(1)
    return both.to(torch.int8) - ZERO


def scales_and_offsets(weight_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets [N, G] in float32."""
    real = weight_scale.to(torch.float32)
    return (real[..., 0], real[..., 1]) if real.dim() == 3 else (real, None)


def real_weight(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """The float32 weight [N, K] that codes and scales stand for."""
    if not has_groups(weight_scale):
        return weight * weight_scale[:, None]
    scales, offsets = scales_and_offsets(weight_scale)
    codes = torch.unflatten(codes_of(weight), 1, (scales.shape[1], -1))
    real = codes * scales[..., None]
    if offsets is not None:
        real = real + offsets[..., None]
    return real.flatten(1)


#: Real weights that are made at a time where all of them would be too many: they stay in L2.
_REAL_AT_A_TIME = 1 << 18


def real_product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Float ``x`` [..., K] times the real weight, whose floats are never all in memory."""
    outputs, features = weight.shape[0], features_of(weight)
    each = max(_REAL_AT_A_TIME // features // 16, 1) * 16
    if outputs <= each:
        return F.linear(x, real_weight(weight, weight_scale), bias)
    out = x.new_empty((*x.shape[:-1], outputs))
    for begin in range(0, outputs, each):
        some = slice(begin, begin + each)
        out[..., some] = F.linear(x, real_weight(weight[some], weight_scale[some]))
    return out if bias is None else out.add_(bias)


def exact_half(numbers: torch.Tensor) -> torch.Tensor:
    """``numbers`` as float16 where all of them are numbers of float16, else as they are."""
    half = numbers.to(torch.float16)
    return half if torch.equal(half.float(), numbers) else numbers


def check_groups(op: str, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    """Raise InvalidInputError unless ``weight`` and the scales of its groups fit each other."""
    if weight.dtype not in (torch.int8, torch.uint8) or weight.dim() != 2:
        raise InvalidInputError(
            f"x86quant::{op}: a weight with groups must be int8 [out, in], or uint8 [out, in / 2] "
            f"with two codes a byte, got {weight.dtype} {tuple(weight.shape)}"
        )
    shape = tuple(weight_scale.shape)
    if (
        weight_scale.dtype not in (torch.float16, torch.float32)
        or len(shape) not in (2, 3)
        or shape[0] != weight.shape[0]
        or shape[2:] not in ((), (2,))
    ):
        raise InvalidInputError(
            f"x86quant::{op}: the scales of groups must be float16 or float32 of shape "
            f"({weight.shape[0]}, groups), or ({weight.shape[0]}, groups, 2) with offsets, got "
            f"{weight_scale.dtype} {shape}"
        )
    features, groups = features_of(weight), shape[1]
    if not 0 < groups <= MOST_GROUPS or features % groups or features // groups % GROUP_STEP:
        raise InvalidInputError(
            f"x86quant::{op}: {groups} groups do not divide {features} input features into groups "
            f"of a multiple of {GROUP_STEP}, {MOST_GROUPS} of them at most"
        )


def group_product(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Row codes [rows, K], scales and zero points [rows, 1] times the transpose of ``weight``."""
    # float64 holds every int32 sum exactly, and the product of two float32.
    scales, offsets = scales_and_offsets(weight_scale)
    groups = scales.shape[1]
    inputs = torch.unflatten(codes.double(), 1, (groups, -1))
    weights = torch.unflatten(codes_of(weight).double(), 1, (groups, -1))
    v = scale.new_zeros(codes.shape[0], weight.shape[0])
    total = scales.new_zeros(weight.shape[0], dtype=torch.float64)
    for group in range(groups):
        x, w = inputs[:, group], weights[:, group]
        v = _fma((x @ w.t()).float(), scales[:, group], v)
        total = total + scales[:, group].double() * w.sum(1)
        if offsets is not None:
            v = _fma(x.sum(1, keepdim=True).float(), offsets[:, group], v)
            total = total + offsets[:, group].double() * w.shape[1]
    v = _fma(-zero_point.float(), total.float(), v)
    out = _fma(v, scale, v.new_zeros(()) if bias is None else bias)
    return out if activation is None else activation(out)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c``, rounded once."""
    return (a.double() * b.double() + c.double()).float()
