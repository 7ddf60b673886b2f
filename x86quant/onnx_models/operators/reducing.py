"""Reductions, and running sums."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.onnx_models.operator_table import numbers_of, operator


def _dims(x: Any, wanted: Any, axes: Any, nothing: int) -> list[int] | None:
    """The dimensions to reduce; None for none."""
    wanted = axes if wanted is None else numbers_of(wanted)
    if wanted is None or len(wanted) == 0:
        return None if nothing else list(range(x.dim()))
    return list(wanted)


def _sum(x: Any, dims: list[int], keep: bool) -> Any:
    return torch.sum(x, dims, keepdim=keep).to(x.dtype) if dims else x


def _mean(x: Any, dims: list[int], keep: bool) -> Any:
    if not dims:
        return x
    if x.is_floating_point():
        return torch.mean(x, dims, keepdim=keep)
    return torch.mean(x.to(torch.float64), dims, keepdim=keep).to(x.dtype)


def _greatest(x: Any, dims: list[int], keep: bool) -> Any:
    return _with_empty(torch.amax, x, dims, keep, greatest=True)


def _least(x: Any, dims: list[int], keep: bool) -> Any:
    return _with_empty(torch.amin, x, dims, keep, greatest=False)


def _with_empty(function: Any, x: Any, dims: list[int], keep: bool, *, greatest: bool) -> Any:
    if isinstance(x, torch.Tensor) and x.numel() == 0:
        sizes = [1 if n in [d % x.dim() for d in dims] else size for n, size in enumerate(x.shape)]
        if x.is_floating_point():
            value: Any = -torch.inf if greatest else torch.inf
        else:
            value = torch.iinfo(x.dtype).min if greatest else torch.iinfo(x.dtype).max
        found = torch.full(sizes, value, dtype=x.dtype)
        return found if keep else found.squeeze(tuple(dims))
    return function(x, dims, keepdim=keep) if dims else x


def _product(x: Any, dims: list[int], keep: bool) -> Any:
    for dim in sorted((d + x.dim() if d < 0 else d for d in dims), reverse=True):
        x = torch.prod(x, dim, keepdim=keep).to(x.dtype)
    return x


def _l1(x: Any, dims: list[int], keep: bool) -> Any:
    return _sum(torch.abs(x), dims, keep)


def _l2(x: Any, dims: list[int], keep: bool) -> Any:
    if x.is_floating_point():
        return torch.sqrt(_sum(x * x, dims, keep))
    return torch.sqrt(_sum(x * x, dims, keep).to(torch.float64)).to(x.dtype)


def _squares(x: Any, dims: list[int], keep: bool) -> Any:
    return _sum(x * x, dims, keep)


def _log_sum(x: Any, dims: list[int], keep: bool) -> Any:
    return torch.log(_sum(x, dims, keep))


def _log_sum_exp(x: Any, dims: list[int], keep: bool) -> Any:
    return torch.logsumexp(x, dims, keepdim=keep) if dims else x


#: By operator: the reduction, and what an element alone becomes.
_REDUCTIONS = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMax": _greatest,
    "ReduceMin": _least,
    "ReduceProd": _product,
    "ReduceL1": _l1,
    "ReduceL2": _l2,
    "ReduceSumSquare": _squares,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _log_sum_exp,
}


@operator(*_REDUCTIONS, numbers=(1,))
def reduce(
    x: Any,
    dims: Any = None,
    *,
    axes: Any = None,
    keepdims: int,
    noop_with_empty_axes: int = 0,
    op_type: str,
) -> Any:
    """One value of those along some dimensions; which are an input since version 13 or 18."""
    found = _dims(x, dims, axes, noop_with_empty_axes)
    if x.dtype is torch.bool:
        return reduce(
            x.to(torch.uint8), found, keepdims=keepdims, op_type=op_type,
            noop_with_empty_axes=noop_with_empty_axes,
        ).to(torch.bool)  # fmt: skip
    if found is None:  # of no dimension: each element alone
        return _REDUCTIONS[op_type](x, [], True)
    return _REDUCTIONS[op_type](x, found, bool(keepdims)) if x.dim() else x


@operator("ArgMax", "ArgMin")
def arg_extreme(
    x: Any, *, axis: int, keepdims: int, select_last_index: int = 0, op_type: str
) -> Any:
    """Where the greatest or least value is; the first or last of equal ones."""
    function = torch.argmax if op_type == "ArgMax" else torch.argmin
    if not select_last_index:
        return function(x, axis, keepdim=bool(keepdims))
    return x.shape[axis] - 1 - function(torch.flip(x, (axis,)), axis, keepdim=bool(keepdims))


def _running(function: Any, first: Any, x: Any, axis: Any, exclusive: int, reverse: int) -> Any:
    axis = axis if isinstance(axis, int) else int(axis.item())
    x = torch.flip(x, (axis,)) if reverse else x
    found = function(x, axis).to(x.dtype)
    if exclusive:
        head = first(x.narrow(axis, 0, 1))
        found = torch.cat([head, found.narrow(axis, 0, x.shape[axis] - 1)], axis)
    return torch.flip(found, (axis,)) if reverse else found


@operator("CumSum", scalars=(1,))
def cumulative_sum(x: Any, axis: Any, *, exclusive: int, reverse: int) -> Any:
    """Sums up to each place."""
    return _running(torch.cumsum, torch.zeros_like, x, axis, exclusive, reverse)


@operator("CumProd", scalars=(1,))
def cumulative_product(x: Any, axis: Any, *, exclusive: int, reverse: int) -> Any:
    """Products up to each place."""
    return _running(torch.cumprod, torch.ones_like, x, axis, exclusive, reverse)


def _rows(x: Any, axis: int) -> Any:
    """Before version 13, everything from ``axis`` on was one row."""
    axis = axis + x.dim() if axis < 0 else axis
    return torch.flatten(x, axis) if axis < x.dim() else x.unsqueeze(-1)


@operator("Softmax", "LogSoftmax", "Hardmax")
def softmax(x: Any, *, axis: int, version: int, op_type: str) -> Any:
    """Shares of one along ``axis``; or their logarithms; or one for the first greatest."""
    if version < 13 and axis not in (-1, x.dim() - 1):
        return _softmax(_rows(x, axis), -1, op_type).reshape(x.shape)
    return _softmax(x, axis, op_type)


def _softmax(x: Any, axis: int, op_type: str) -> Any:
    if op_type == "Softmax":
        return torch.softmax(x, axis)
    if op_type == "LogSoftmax":
        return torch.log_softmax(x, axis)
    best = torch.argmax(x, axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, best, 1.0)
