"""What calibration asks of many floats, in one pass over them: plain torch takes four to six."""

from __future__ import annotations

import torch

from x86quant import extension
from x86quant.packing.linear_dynamic import extension_loads


def counted(x: torch.Tensor, factor: float, start: int, bins: int) -> torch.Tensor:
    """How many of ``x`` lie in each bin [n, n + 1) / factor from ``start`` on: all do in one."""
    if _is_plain(x):
        found: torch.Tensor = extension.native().count_bins(x.contiguous(), factor, start, bins)
        return found
    # They lie within 2**21; torch converts to int64 one by one, to int32 eight at a time.
    numbers = torch.floor(x.flatten() * factor).to(torch.int32) - start
    return torch.bincount(numbers, minlength=bins)


def rounded(
    x: torch.Tensor, factor: float, low: int, high: int, step: float, *, in_place: bool = False
) -> torch.Tensor:
    """``x * factor``, rounded half to even between two whole numbers, times ``step``."""
    values = in_memory_order(x)
    if (
        _is_plain(x)
        and values.is_contiguous()
        and not (x.requires_grad and torch.is_grad_enabled())
    ):
        out = x if in_place else torch.empty_like(x)
        extension.native().round_floats(values, factor, low, high, step, in_memory_order(out))
        return out
    return (x.mul_ if in_place else x.mul)(factor).round_().clamp_(low, high).mul_(step)


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """``x``, its dimensions in such an order that adjacent values are adjacent in memory."""
    if x.is_contiguous():
        return x
    strides = x.stride()
    return x.permute(sorted(range(x.dim()), key=lambda dim: -strides[dim]))


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and x.dtype == torch.float32 and x.is_cpu and extension_loads()
