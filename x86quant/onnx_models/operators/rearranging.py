"""Operators that move, repeat and cut, and those that make tensors by sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.errors import InvalidInputError
from x86quant.onnx_models.element_types import torch_dtype
from x86quant.onnx_models.operator_table import numbers_of, operator, type_lacks


@operator("Reshape", numbers=(1,), oldest=5)
def reshape(x: Any, sizes: Any, *, allowzero: int = 0) -> Any:
    """``x`` with other sizes; 0 keeps one, -1 is what is left."""
    wanted = numbers_of(sizes)
    if not allowzero:
        zero = [isinstance(size, int) and size == 0 for size in wanted]
        wanted = [x.shape[n] if zero[n] else size for n, size in enumerate(wanted)]
    return x.reshape(wanted)


@operator("Flatten")
def flatten(x: Any, *, axis: int) -> Any:
    """A matrix: the dimensions before ``axis`` by the others."""
    axis = axis + x.dim() if axis < 0 else axis
    if axis == 1 and x.dim() > 1:
        return torch.flatten(x, 1)
    if axis == 0:
        return x.reshape(1, -1)
    if axis == x.dim():
        return x.reshape(-1, 1)
    return torch.flatten(torch.flatten(x, axis), 0, axis - 1)


@operator("Transpose")
def transpose(x: Any, *, perm: Any = None) -> Any:
    """Dimensions in another order, turned round unless one is given."""
    return x.permute(tuple(range(x.dim()))[::-1] if perm is None else tuple(perm))


@operator("Squeeze", numbers=(1,))
def squeeze(x: Any, dims: Any = None, *, axes: Any = None) -> Any:
    """Without dimensions of size one."""
    dims = axes if dims is None else numbers_of(dims)
    if dims is None:
        return x.squeeze()
    for dim in sorted((d + x.dim() if d < 0 else d for d in dims), reverse=True):
        x = x.select(dim, 0)
    return x


@operator("Unsqueeze", numbers=(1,))
def unsqueeze(x: Any, dims: Any = None, *, axes: Any = None) -> Any:
    """With dimensions of size one, counted in the result."""
    dims = list(axes) if dims is None else numbers_of(dims)
    rank = x.dim() + len(dims) if min(dims, default=0) < 0 else 0
    for dim in sorted(d + rank if d < 0 else d for d in dims):
        x = x.unsqueeze(dim)
    return x


@operator("Concat", oldest=4)
def concat(*xs: Any, axis: int) -> Any:
    """One behind the other."""
    return torch.cat(xs, axis)


@operator("Split", numbers=(1,), returns_tuple=True, oldest=2)
def split(
    x: Any,
    sizes: Any = None,
    *,
    axis: int,
    split: Any = None,
    num_outputs: int | None = None,
    outputs: int,
) -> Any:
    """Parts of sizes given, or as equal as can be."""
    sizes = split if sizes is None else sizes
    if sizes is not None:
        return torch.split(x, numbers_of(sizes), axis)
    size = x.shape[axis]
    number = outputs if num_outputs is None else num_outputs
    part = (size + number - 1) // number
    return torch.split(x, part, axis)


@operator("Slice", numbers=(1, 2, 3, 4))
def cut(
    x: Any,
    begin: Any = None,
    end: Any = None,
    dims: Any = None,
    steps: Any = None,
    *,
    starts: Any = None,
    ends: Any = None,
    axes: Any = None,
) -> Any:
    """Parts of dimensions; by attributes until version 9."""
    begin = numbers_of(starts if begin is None else begin)
    end = numbers_of(ends if end is None else end)
    dims = axes if dims is None else dims
    dims = list(range(len(begin))) if dims is None else numbers_of(dims)
    steps = [1] * len(begin) if steps is None else numbers_of(steps)
    for b, e, dim, step in zip(begin, end, dims, steps, strict=True):
        x = _cut(x, b, e, dim + x.dim() if dim < 0 else dim, step)
    return x


#: Bounds beyond this mean "to the end".
_FAR = 2**31 - 1


def _cut(x: Any, begin: Any, end: Any, dim: int, step: int) -> Any:
    if step > 0:
        begin = None if isinstance(begin, int) and begin == 0 else begin
        end = None if isinstance(end, int) and end >= _FAR else end
        return x[(slice(None),) * dim + (slice(begin, end, step),)]
    # Backwards: the same indices, counted from the other end of the dimension turned round.
    size = x.shape[dim]
    first = size - 1 if begin >= _FAR else begin + size if begin < 0 else begin
    last = end + size if end < 0 else end
    first, last = min(first, size - 1), max(last, -1)
    flipped = torch.flip(x, (dim,))
    return flipped[(slice(None),) * dim + (slice(size - 1 - first, size - 1 - last, -step),)]


@operator("Expand", numbers=(1,))
def expand(x: Any, sizes: Any) -> Any:
    """Repeated along dimensions of size one, in either direction."""
    wanted = numbers_of(sizes)
    missing = x.dim() - len(wanted)
    wanted = [1] * missing + wanted
    same = [isinstance(size, int) and size == 1 for size in wanted]
    fixed = [-1 if same[n] and n + missing >= 0 else size for n, size in enumerate(wanted)]
    new = len(wanted) - x.dim()
    fixed = [1 if size == -1 and n < new else size for n, size in enumerate(fixed)]
    return x.expand(fixed)


@operator("Tile", numbers=(1,), oldest=6)
def tile(x: Any, repeats: Any) -> Any:
    """Repeated along each dimension."""
    return x.repeat(numbers_of(repeats))


@operator("Pad", numbers=(1, 3), scalars=(2,), oldest=2)
def pad(
    x: Any,
    width: Any = None,
    number: Any = None,
    dims: Any = None,
    *,
    mode: str,
    pads: Any = None,
    value: float = 0.0,
) -> Any:
    """Wider by constants, mirrored or repeated values; negative widths cut."""
    widths = numbers_of(pads if width is None else width)
    dims = list(range(x.dim())) if dims is None else numbers_of(dims)
    dims = [dim + x.dim() if dim < 0 else dim for dim in dims]
    rank = x.dim()
    order: list[Any] = [0] * (2 * rank)  # of torch: from the last dimension
    for n, dim in enumerate(dims):
        order[2 * (rank - 1 - dim)] = widths[n]
        order[2 * (rank - 1 - dim) + 1] = widths[n + len(dims)]
    if mode == "constant":
        return _pad_constant(x, order, value if number is None else number)
    for n in range(0, len(order), 2):
        if isinstance(order[n], int) and order[n] == order[n + 1] == 0:
            continue
        x = _pad_by_index(x, rank - 1 - n // 2, order[n], order[n + 1], mode)
    return x


def _pad_constant(x: Any, order: list[Any], value: Any) -> Any:
    if not isinstance(value, int | float | bool):
        value = value.item()
    while len(order) > 2 and all(isinstance(v, int) and v == 0 for v in order[-2:]):
        order = order[:-2]
    if x.dtype is torch.bool:
        return F.pad(x.to(torch.uint8), order, value=int(value)).to(torch.bool)
    return F.pad(x, order, value=value)


def _pad_by_index(x: Any, dim: int, before: Any, behind: Any, mode: str) -> Any:
    size = x.shape[dim]
    index = torch.arange(-before, size + behind)
    if mode == "edge":
        index = index.clamp(0, size - 1)
    elif mode == "wrap":
        index = index % size
    else:
        turn = max(2 * (size - 1), 1) if isinstance(size, int) else 2 * (size - 1)
        index = index % turn
        index = torch.minimum(index, turn - index)
    return torch.index_select(x, dim, index)


@operator("Shape")
def shape_tensor(x: Any, *, start: int = 0, end: int | None = None) -> Any:
    """The sizes of ``x``; where their number is known, they are followed one by one instead."""
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


@operator("Size")
def size_tensor(x: Any) -> Any:
    """The number of elements of ``x``."""
    return torch.tensor(math.prod(x.shape), dtype=torch.int64)


def tensor_of_numbers(values: list[Any], scalar: bool) -> Any:
    """Sizes as a tensor of int64, where something else than sizes is made of them."""
    found = [torch.full((), value, dtype=torch.int64) for value in values]
    if scalar:
        return found[0]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)


@operator("ConstantOfShape", numbers=(0,))
def constant_of_shape(sizes: Any, *, value: Any = None) -> Any:
    """One value, in the sizes given."""
    if value is None:
        return torch.zeros(numbers_of(sizes), dtype=torch.float32)
    return torch.full(numbers_of(sizes), value.item(), dtype=value.dtype)


@operator("Range", scalars=(0, 1, 2))
def value_range(start: Any, limit: Any, delta: Any, *, dtype: torch.dtype) -> Any:
    """Equal steps from ``start`` up to before ``limit``."""
    bounds = [v if isinstance(v, int | float) else _number(v) for v in (start, limit, delta)]
    if dtype.is_floating_point and all(isinstance(v, int | float) for v in bounds):
        number = max(math.ceil((bounds[1] - bounds[0]) / bounds[2]), 0)
        return torch.arange(number).to(dtype) * bounds[2] + bounds[0]
    return torch.arange(bounds[0], bounds[1], bounds[2], dtype=dtype)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


@operator("EyeLike", lacks=type_lacks)
def eye_like(x: Any, *, dtype: int | None = None, k: int) -> Any:
    """Ones on a diagonal, in the sizes of ``x``."""
    kind = x.dtype if dtype is None else torch_dtype(dtype, "the result of EyeLike")
    rows, columns = x.shape
    return (torch.arange(columns)[None, :] - torch.arange(rows)[:, None] == k).to(kind)


@operator("DepthToSpace")
def depth_to_space(x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    """Channels moved into blocks of pixels."""
    b = blocksize
    if mode == "CRD":
        return F.pixel_shuffle(x, b)
    n, c, h, w = x.shape
    x = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, c // (b * b), h * b, w * b)


@operator("SpaceToDepth")
def space_to_depth(x: Any, *, blocksize: int) -> Any:
    """Blocks of pixels moved into channels."""
    b = blocksize
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(n, c * b * b, h // b, w // b)


@operator("ReverseSequence")
def reverse_sequence(x: Any, lengths: Any, *, batch_axis: int, time_axis: int) -> Any:
    """The first ``lengths`` steps of each sample turned round."""
    x = x.transpose(1, time_axis) if batch_axis == 0 else x.transpose(0, 1)
    steps = torch.arange(x.shape[1])[None, :]
    index = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2)).expand(x.shape)
    found = torch.gather(x, 1, index)
    return found.transpose(1, time_axis) if batch_axis == 0 else found.transpose(0, 1)


@operator("Trilu", scalars=(1,))
def trilu(x: Any, diagonal: Any = None, *, upper: int) -> Any:
    """The upper or lower triangle."""
    k = 0 if diagonal is None else diagonal if isinstance(diagonal, int) else diagonal.item()
    return torch.triu(x, k) if upper else torch.tril(x, k)


@operator("CenterCropPad", numbers=(1,))
def center_crop_pad(x: Any, sizes: Any, *, axes: Any = None) -> Any:
    """The middle, or with zeros around."""
    dims = list(range(x.dim())) if axes is None else list(axes)
    for dim, wanted in zip(dims, numbers_of(sizes), strict=True):
        size = x.shape[dim]
        if size >= wanted:
            x = x.narrow(dim, (size - wanted) // 2, wanted)
            continue
        before = (wanted - size) // 2
        dim = dim + x.dim() if dim < 0 else dim
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, wanted - size - before])
    return x


def of_sizes(x: Any, name: str, sizes: tuple[int | None, ...]) -> Any:
    """``x``, an input of which the file fixes some sizes.

    Raises:
        InvalidInputError: it has others.
    """
    if not isinstance(x, torch.Tensor):
        return x  # it is traced, and its sizes are known where it runs
    wrong = any(
        size is not None and x.dim() > n and x.shape[n] != size for n, size in enumerate(sizes)
    )
    if x.dim() != len(sizes) or wrong:
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise InvalidInputError(
            f"the input {name!r} is of sizes {tuple(x.shape)}; the ONNX model takes ({wanted})"
        )
    return x
