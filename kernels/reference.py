"""The arithmetic that every kernel must equal within one step: slow, obvious, in plain torch.

All functions take plain integer tensors with explicit scales and zero points. In short::

    accumulator = sum((x - x_zero_point) * (w - w_zero_point))            exact
    y = clamp(round_half_even(accumulator * multiplier + bias) + zero_point)

It is a kernel like any other: always legal and always last, so that every op can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from .base import Kernel

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec


class ReferenceKernel(Kernel):
    """The plain integer arithmetic of this module. It refuses nothing."""

    name: ClassVar[str] = "reference"
    engine: ClassVar[str] = "reference"

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """Nothing: the last resort has to run everything."""
        return []


def accumulate_linear(
    x: Tensor, x_zero_point: int, weight: Tensor, weight_zero_point: Tensor | int = 0
) -> Tensor:
    """Exact integer product of ``x [..., K]`` and ``weight [N, K]``: ``[..., N]``."""
    w = _centred(weight, weight_zero_point, axis=0)
    return F.linear(x.double() - x_zero_point, w).to(torch.int64)


def accumulate_conv(
    x: Tensor,
    x_zero_point: int,
    weight: Tensor,
    weight_zero_point: Tensor | int = 0,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    transposed: bool = False,
    output_padding: Sequence[int] = (),
) -> Tensor:
    """Exact integer convolution of ``x [B, C, *spatial]``, over 1, 2 or 3 spatial dimensions.

    ``weight`` is ``[out, in/groups, *kernel]``, or ``[in, out/groups, *kernel]`` when transposed.
    Padding stands for the real number 0, that is for the code ``x_zero_point``.
    """
    dims = weight.dim() - 2
    # float64 holds every integer below 2**53: the sums are exact.
    centred = x.double() - x_zero_point
    if transposed:
        # Per channel is per output channel, axis 1, whose channels repeat for each group.
        w = _centred(weight, weight_zero_point, axis=1, groups=groups)
        conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        y = conv(
            centred,
            w,
            None,
            list(stride),
            list(padding),
            list(output_padding or (0,) * dims),
            groups,
            list(dilation),
        )
    else:
        w = _centred(weight, weight_zero_point, axis=0)
        forward = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        y = forward(centred, w, None, list(stride), list(padding), list(dilation), groups)
    return y.to(torch.int64)


def requantize(
    accumulator: Tensor,
    multiplier: Tensor | float,
    bias: Tensor | None,
    zero_point: int,
    *,
    channel_axis: int,
    relu: bool = False,
) -> Tensor:
    """Scale ``accumulator`` to uint8 codes.

    ``multiplier`` is ``x_scale * w_scale / y_scale`` and ``bias`` the real bias over ``y_scale``;
    both are float32, one for all or one for each channel along ``channel_axis``.
    """
    y = accumulator.float() * _along(multiplier, accumulator, channel_axis)
    if bias is not None:
        y = y + _along(bias, accumulator, channel_axis)
    y = torch.round(y) + zero_point  # torch.round rounds halves to even
    return y.clamp(zero_point if relu else 0, 255).to(torch.uint8)


def linear_dynamic(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | float,
    weight_zero_point: Tensor | int = 0,
    bias: Tensor | None = None,
    *,
    activation_max: int = 255,
    relu: bool = False,
) -> Tensor:
    """Float in, float out: quantize ``x`` by its own range, multiply exactly, scale back."""
    low, high = (min(float(x.min()), 0.0), max(float(x.max()), 0.0)) if x.numel() else (0.0, 0.0)
    scale = (high - low) / activation_max or 1.0
    zero_point = round(-low / scale)
    codes = torch.clamp(torch.round(x / scale) + zero_point, 0, activation_max).to(torch.uint8)
    accumulator = accumulate_linear(codes, zero_point, weight, weight_zero_point)
    y = accumulator.float() * (torch.as_tensor(weight_scale, dtype=torch.float32) * scale)
    if bias is not None:
        y = y + bias
    return y.relu() if relu else y


def _centred(weight: Tensor, zero_point: Tensor | int, axis: int, groups: int = 1) -> Tensor:
    """``weight - zero_point`` in float64, the zero point running along ``axis``."""
    if isinstance(zero_point, int) or zero_point.numel() == 1:
        return weight.double() - float(zero_point)
    if groups == 1:
        return weight.double() - _along(zero_point, weight, axis)
    per_group = [
        _centred(w, z, axis)
        for w, z in zip(weight.chunk(groups), zero_point.chunk(groups), strict=True)
    ]
    return torch.cat(per_group)


def _along(values: Tensor | float, like: Tensor, axis: int) -> Tensor:
    """``values`` shaped to broadcast along ``axis`` of ``like``."""
    values = torch.as_tensor(values)
    if values.numel() == 1:
        return values.reshape(())
    shape = [1] * like.dim()
    shape[axis] = -1
    return values.reshape(shape)
