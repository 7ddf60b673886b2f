"""Operators that look up, write and sort by index."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.onnx_models.operator_table import operator


def _from_start(index: Any, size: Any) -> Any:
    """``index`` without negative ones, which count from the end."""
    return torch.where(index < 0, index + size, index)


@operator("Gather", scalars=(1,))
def gather(x: Any, index: Any, *, axis: int) -> Any:
    """What lies at ``index`` along ``axis``, in the sizes of ``index``."""
    if isinstance(index, int):
        return x.select(axis, index)
    axis = axis + x.dim() if axis < 0 else axis
    index = _from_start(index.to(torch.int64), x.shape[axis])
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return torch.nn.functional.embedding(index, x)
    found = torch.index_select(x, axis, index.reshape(-1))
    if index.dim() == 1:
        return found
    return found.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


@operator("GatherElements")
def gather_elements(x: Any, index: Any, *, axis: int) -> Any:
    """Element by element, what lies at ``index`` along ``axis``."""
    return torch.gather(x, axis, _from_start(index.to(torch.int64), x.shape[axis]))


@operator("GatherND")
def gather_nd(x: Any, index: Any, *, batch_dims: int = 0) -> Any:
    """What lies at tuples of indices, behind common leading dimensions."""
    index = index.to(torch.int64)
    batch = x.shape[:batch_dims]
    depth = index.shape[-1]
    x = x.reshape(-1, *x.shape[batch_dims:])
    flat = index.reshape(x.shape[0], -1, depth)
    first = torch.arange(x.shape[0])[:, None].expand(flat.shape[:2])
    parts = [_from_start(flat[..., n], x.shape[n + 1]) for n in range(depth)]
    places = (first, *parts)
    found = x[places]
    return found.reshape(*batch, *index.shape[batch_dims:-1], *x.shape[depth + 1 :])


@operator("ScatterElements", "Scatter")
def scatter_elements(
    x: Any, index: Any, updates: Any, *, axis: int, reduction: str = "none"
) -> Any:
    """``x`` with elements written, or joined, along ``axis``."""
    index = _from_start(index.to(torch.int64), x.shape[axis])
    if reduction == "none":
        return torch.scatter(x, axis, index, updates)
    kind = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction]
    return torch.scatter_reduce(x, axis, index, updates, kind)


@operator("ScatterND")
def scatter_nd(x: Any, index: Any, updates: Any, *, reduction: str = "none") -> Any:
    """``x`` with parts written, or joined, at tuples of indices."""
    index = index.to(torch.int64)
    depth = index.shape[-1]
    inner = x.shape[depth:]
    place = torch.zeros(index.shape[:-1], dtype=torch.int64)
    for n in range(depth):
        place = place * x.shape[n] + _from_start(index[..., n], x.shape[n])
    rows = 1
    for size in x.shape[:depth]:
        rows = rows * size
    flat = x.reshape(rows, -1) if x.dim() > depth else x.reshape(rows, 1)
    values = updates.reshape(-1, flat.shape[1])
    places = place.reshape(-1, 1).expand(-1, flat.shape[1])
    found = scatter_elements(flat, places, values, axis=0, reduction=reduction)
    return found.reshape(*x.shape[:depth], *inner)


@operator("TensorScatter")
def tensor_scatter(
    cache: Any, update: Any, first: Any = None, *, axis: int, mode: str = "linear"
) -> Any:
    """``cache`` with ``update`` written from each sample's place along ``axis``."""
    axis = axis + cache.dim() if axis < 0 else axis
    steps = torch.arange(update.shape[axis])[None, :]
    index = steps.expand(cache.shape[0], -1)
    if first is not None:
        index = first[:, None] + steps
    if mode == "circular":
        index = index % cache.shape[axis]
    sizes = [1] * cache.dim()
    sizes[0], sizes[axis] = cache.shape[0], update.shape[axis]
    return torch.scatter(cache, axis, index.reshape(sizes).expand(update.shape), update)


@operator("TopK", scalars=(1,), returns_tuple=True)
def top_k(
    x: Any,
    number: Any = None,
    *,
    axis: int,
    k: int | None = None,
    largest: int = 1,
    sorted: int = 1,
) -> Any:
    """The greatest or least values, and where they are; the first of equal ones first."""
    count: Any = k if number is None else number
    if not isinstance(count, int):
        count = int(count.item())
    values, index = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, count), index.narrow(axis, 0, count)


@operator("OneHot", scalars=(1,))
def one_hot(index: Any, depth: Any, values: Any, *, axis: int) -> Any:
    """One value at the index, another elsewhere, along a new dimension."""
    depth = int(depth if isinstance(depth, int | float) else depth.item())
    index = index.to(torch.int64)
    axis = axis + index.dim() + 1 if axis < 0 else axis
    places = torch.arange(depth).reshape(
        [depth if n == axis else 1 for n in range(index.dim() + 1)]
    )
    hit = torch.where(index < 0, index + depth, index).unsqueeze(axis) == places
    return torch.where(hit, values[1], values[0])


@operator("NonZero")
def non_zero(x: Any) -> Any:
    """The indices of what is not zero, a row for each dimension."""
    return torch.nonzero(x).transpose(0, 1)


@operator("Compress")
def compress(x: Any, condition: Any, *, axis: int | None = None) -> Any:
    """What the condition chooses along ``axis``."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    return torch.index_select(x, axis, torch.nonzero(condition).reshape(-1))


@operator("Unique", returns_tuple=True)
def unique(x: Any, *, axis: int | None = None, sorted: int, outputs: int) -> Any:
    """Each value once; its first place, the way back, and how often it is there."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    number = values.shape[axis]
    first = torch.full((number,), x.shape[axis], dtype=torch.int64)
    first = first.scatter_reduce(0, inverse, torch.arange(x.shape[axis]), "amin")
    if not sorted:
        order = torch.argsort(first)
        place = torch.argsort(order)
        values, first, counts = values.index_select(axis, order), first[order], counts[order]
        inverse = place[inverse]
    return (values, first, inverse, counts)[:outputs]


@operator("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(x: Any, index: Any) -> Any:
    """Columns of ``x``."""
    return torch.index_select(x, -1, index.reshape(-1))
