"""Pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.onnx_models.operator_table import numbers_of, operator
from x86quant.onnx_models.operators.convolving import is_even, torch_order, widths_around

_MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE: tuple[Any, ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def _windows(
    x: Any, kernel: Sequence[int], strides: Any, dilations: Any, pads: Any, auto_pad: str
) -> tuple[list[int], list[int], list[Any]]:
    rank = len(kernel)
    strides, dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
    sizes = [x.shape[n + 2] for n in range(rank)]
    return strides, dilations, widths_around(sizes, kernel, strides, dilations, pads, auto_pad)


def _more_behind(
    x: Any,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: list[Any],
    ceil_mode: int,
) -> list[Any]:
    """How much wider ``x`` must be so that the last window, begun within it, is a whole one."""
    rank, more = len(kernel), []
    if not ceil_mode:
        return [0] * rank
    for n in range(rank):
        size = x.shape[n + 2]
        reach = (kernel[n] - 1) * dilations[n] + 1
        wide = size + pads[n] + pads[n + rank]
        steps = -(-(wide - reach) // strides[n])
        if steps * strides[n] >= size + pads[n]:
            steps -= 1
        more.append(max(steps * strides[n] + reach - wide, 0))
    return more


def _widened(pads: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """``pads`` with so much more behind."""
    rank = len(more)
    return [*pads[:rank], *(a + b for a, b in zip(pads[rank:], more, strict=True))]


def _are_pools(pads: Sequence[Any], kernel: Sequence[int]) -> bool:
    """Whether torch's pooling takes such padding: the same on both sides, half a window at most."""
    small = all(isinstance(p, int) and 2 * p <= k for p, k in zip(pads, [*kernel] * 2, strict=True))
    return small and is_even(pads)


@operator("MaxPool", returns_tuple=True)
def max_pool(
    x: Any,
    *,
    auto_pad: str,
    ceil_mode: int = 0,
    dilations: Any = None,
    kernel_shape: Any,
    pads: Any = None,
    storage_order: int = 0,
    strides: Any = None,
    outputs: int,
) -> Any:
    """The greatest of each window, and where it is in the whole tensor."""
    kernel = list(kernel_shape)
    rank = len(kernel)
    strides, dilations, around = _windows(x, kernel, strides, dilations, pads, auto_pad)
    if outputs > 1:
        return _max_pool_with_places(
            x, kernel, strides, dilations, around, ceil_mode, storage_order
        )
    if not x.is_floating_point():
        found = max_pool(
            x.to(torch.float64), auto_pad="NOTSET", ceil_mode=ceil_mode, dilations=dilations,
            kernel_shape=kernel, pads=around, strides=strides, outputs=1,
        )  # fmt: skip
        return (found[0].to(x.dtype),)
    if _are_pools(around, kernel):
        args = (kernel, strides, around[:rank], dilations, bool(ceil_mode))
        return (_MAX[rank - 1](x, *args),)
    around = _widened(around, _more_behind(x, kernel, strides, dilations, around, ceil_mode))
    x = F.pad(x, torch_order(around), value=-math.inf)
    return (_MAX[rank - 1](x, kernel, strides, 0, dilations),)


def _max_pool_with_places(
    x: Any, kernel: Any, strides: Any, dilations: Any, around: Any, ceil_mode: int, by_column: int
) -> Any:
    """By indices of the padded picture, counted in the whole tensor without padding."""
    rank = len(kernel)
    whole = torch.arange(math.prod(x.shape)).reshape(x.shape)
    if by_column:
        planes = math.prod(x.shape[:2])
        one = torch.arange(math.prod(x.shape[2:])).reshape(tuple(x.shape[2:])[::-1])
        one = one.permute(tuple(range(rank))[::-1])
        first = torch.arange(planes).reshape(*x.shape[:2], *[1] * rank) * math.prod(x.shape[2:])
        whole = first + one
    around = _widened(around, _more_behind(x, kernel, strides, dilations, around, ceil_mode))
    wide = F.pad(x.to(torch.float64), torch_order(around), value=-math.inf)
    places = F.pad(whole, torch_order(around), value=-1)
    with_index: Any = (
        torch.max_pool1d_with_indices,
        torch.ops.aten.max_pool2d_with_indices,
        torch.ops.aten.max_pool3d_with_indices,
    )[rank - 1]
    values, index = with_index(wide, kernel, strides, [0] * rank, dilations)
    found = torch.gather(places.flatten(2), 2, index.flatten(2)).reshape(index.shape)
    return values.to(x.dtype), found


@operator("MaxUnpool", numbers=(2,))
def max_unpool(
    x: Any,
    index: Any,
    sizes: Any = None,
    *,
    kernel_shape: Any,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    """Values put back to where they were, zeros elsewhere."""
    rank = len(kernel_shape)
    strides, pads = list(strides or [1] * rank), list(pads or [0] * (2 * rank))
    inner = [
        (x.shape[n + 2] - 1) * strides[n] - pads[n] - pads[n + rank] + kernel_shape[n]
        for n in range(rank)
    ]
    made = [x.shape[0], x.shape[1], *inner]
    wanted = made if sizes is None else numbers_of(sizes)
    flat = torch.zeros(math.prod(made), dtype=x.dtype)
    found = flat.scatter(0, index.reshape(-1), x.reshape(-1)).reshape(made)
    if wanted == made:
        return found
    more = [b - a for a, b in zip(made, wanted, strict=True)][2:]
    return F.pad(found, torch_order([0] * rank + more))


@operator("AveragePool", oldest=7)
def average_pool(
    x: Any,
    *,
    auto_pad: str,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Any = None,
    kernel_shape: Any,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    """The mean of each window, with the padding counted or not."""
    kernel = list(kernel_shape)
    rank = len(kernel)
    strides, dilations, around = _windows(x, kernel, strides, dilations, pads, auto_pad)
    if _are_pools(around, kernel) and max(dilations) == 1:
        counted = bool(count_include_pad)
        return _AVERAGE[rank - 1](x, kernel, strides, around[:rank], bool(ceil_mode), counted)
    more = _more_behind(x, kernel, strides, dilations, around, ceil_mode)
    ones = torch.ones_like(x[:1, :1])
    ones = F.pad(ones, torch_order(around), value=1.0 if count_include_pad else 0.0)
    ones = F.pad(ones, torch_order(_widened([0] * (2 * rank), more)))
    wide = F.pad(x, torch_order(_widened(around, more)))
    return _sums(wide, kernel, strides, dilations) / _sums(ones, kernel, strides, dilations)


def _sums(x: Any, kernel: Sequence[int], strides: Any, dilations: Any) -> Any:
    """The sum of each window."""
    for n, (k, step, dilation) in enumerate(zip(kernel, strides, dilations, strict=True)):
        x = x.unfold(n + 2, (k - 1) * dilation + 1, step)[..., ::dilation].sum(-1)
    return x


@operator("LpPool", oldest=2)
def lp_pool(
    x: Any,
    *,
    auto_pad: str,
    ceil_mode: int = 0,
    dilations: Any = None,
    kernel_shape: Any,
    p: int,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    """The norm of each window."""
    kernel = list(kernel_shape)
    strides, dilations, around = _windows(x, kernel, strides, dilations, pads, auto_pad)
    around = _widened(around, _more_behind(x, kernel, strides, dilations, around, ceil_mode))
    x = F.pad(torch.abs(x) ** p, torch_order(around))
    return _sums(x, kernel, strides, dilations) ** (1.0 / p)


@operator("GlobalAveragePool")
def global_average_pool(x: Any) -> Any:
    """The mean of each channel."""
    rank = x.dim() - 2
    if rank in (1, 2, 3):
        return (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[rank - 1](x, 1)
    return torch.mean(x, list(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(x: Any) -> Any:
    """The greatest of each channel."""
    return torch.amax(x, list(range(2, x.dim())), keepdim=True)


@operator("GlobalLpPool", oldest=2)
def global_lp_pool(x: Any, *, p: int) -> Any:
    """The norm of each channel."""
    return torch.sum(torch.abs(x) ** p, list(range(2, x.dim())), keepdim=True) ** (1.0 / p)
