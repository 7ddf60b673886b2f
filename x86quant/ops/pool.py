"""Windows on codes, for 1, 2 or 3 spatial dimensions: max, average and adaptive average pooling.

And ``pad``, which leaves codes as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.errors import InvalidInputError
from x86quant.ops._numerics import centred, channels_last, check_codes, check_qparams, codes
from x86quant.ops._register import OUT_QPARAMS, X_QPARAMS, register

_WINDOW = "int[] kernel_size, int[] stride, int[] padding"


@register(f"Tensor x, {_WINDOW}, int[] dilation, bool ceil_mode")
def max_pool(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """The largest code of each window; padding never wins. Scale and zero point stay."""
    _check("max_pool", x, len(kernel_size))
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel_size) - 1]
    largest = pool(x.to(torch.float32), kernel_size, stride, padding, dilation, ceil_mode)
    return channels_last(largest.to(torch.uint8))


#: How margins are filled, by the names that ``F.pad`` has for it.
PAD_MODES = ("constant", "replicate", "reflect")


@register("Tensor x, int x_zp, SymInt[] before, SymInt[] after, str mode")
def pad(x: torch.Tensor, x_zp: int, before: list[int], after: list[int], mode: str) -> torch.Tensor:
    """``x`` [N, C, *spatial] with margins: of the real value 0, or filled as ``F.pad`` does.

    Margins below zero cut off what is there.
    """
    _check("pad", x, len(before))
    if not 0 <= x_zp <= 255:
        raise InvalidInputError(f"x86quant::pad: x_zp is a code, got {x_zp}")
    if mode not in PAD_MODES:
        raise InvalidInputError(f"x86quant::pad: no mode {mode!r}: {', '.join(PAD_MODES)}")
    if len(before) != len(after):
        raise InvalidInputError(f"x86quant::pad: margins {before} and {after} are not of x")
    margins = [
        size for both in zip(reversed(before), reversed(after), strict=True) for size in both
    ]
    if mode == "constant":
        return channels_last(F.pad(x, margins, value=x_zp))
    if mode == "reflect" and any(
        max(sizes) >= size for size, *sizes in zip(x.shape[2:], before, after, strict=True)
    ):
        raise InvalidInputError(
            f"x86quant::pad: margins {before} and {after} are wider than {tuple(x.shape)} reflects"
        )
    return channels_last(F.pad(x.to(torch.float32), margins, mode).to(torch.uint8))


@register(
    f"Tensor x, {_WINDOW}, bool ceil_mode, bool count_include_pad, {X_QPARAMS}, {OUT_QPARAMS}"
)
def avg_pool(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
) -> torch.Tensor:
    """The mean of each window, where padding stands for the real value 0."""
    _check("avg_pool", x, len(kernel_size), (x_scale, x_zp), (out_scale, out_zp))
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel_size) - 1]
    mean = pool(centred(x, x_zp), kernel_size, stride, padding, ceil_mode, count_include_pad)
    return codes(mean * (x_scale / out_scale), out_zp)


@register(f"Tensor x, int[] output_size, {X_QPARAMS}, {OUT_QPARAMS}")
def adaptive_avg_pool(
    x: torch.Tensor,
    output_size: list[int],
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
) -> torch.Tensor:
    """The mean of each of ``output_size`` windows that cover the input; -1 keeps a size."""
    _check("adaptive_avg_pool", x, len(output_size), (x_scale, x_zp), (out_scale, out_zp))
    dims = len(output_size)
    sizes = [size if size >= 0 else now for size, now in zip(output_size, x.shape[2:], strict=True)]
    if all(size == 1 for size in sizes):
        mean = centred(x, x_zp).mean(tuple(range(2, 2 + dims)), keepdim=True)
    else:
        pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]
        mean = pool(centred(x, x_zp), sizes)
    return codes(mean * (x_scale / out_scale), out_zp)


@register("Tensor x, int[] output_size")
def adaptive_max_pool(x: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    """The largest code of each of ``output_size`` windows that cover the input; -1 keeps a size."""
    _check("adaptive_max_pool", x, len(output_size))
    whole = tuple(dim for dim, size in enumerate(output_size, 2) if size == 1)
    if all(size in (1, -1) for size in output_size):
        return channels_last(x.amax(whole, keepdim=True) if whole else x.clone())
    sizes = [size if size >= 0 else now for size, now in zip(output_size, x.shape[2:], strict=True)]
    pool: Any = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
    return channels_last(pool[len(sizes) - 1](x.to(torch.float32), sizes).to(torch.uint8))


def _check(op: str, x: torch.Tensor, dims: int, *qparams: tuple[float, int]) -> None:
    check_codes(op, x=x)
    if not 1 <= dims <= 3 or x.dim() != dims + 2:
        raise InvalidInputError(
            f"x86quant::{op}: a window of {dims} dimensions needs x of rank {dims + 2}, "
            f"got shape {tuple(x.shape)}"
        )
    for scale, zero_point in qparams:
        check_qparams(op, scale, zero_point)
