"""Columns of Arrow tables as tensors, and tensors as columns, without copying where it can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute
import torch
import torch.utils.dlpack
from ray.data.extensions import ArrowTensorArray

from x86quant.errors import InvalidInputError

#: One column, several for several arguments or results in order, or by the name of each.
Columns = str | Sequence[str] | Mapping[str, str]


def arguments(
    table: pa.Table, inputs: Columns
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """The arguments of a model, by position and by name, that the columns ``inputs`` hold."""
    if isinstance(inputs, Mapping):
        return (), {name: to_tensor(table, column) for name, column in inputs.items()}
    names = (inputs,) if isinstance(inputs, str) else inputs
    return tuple(to_tensor(table, name) for name in names), {}


def to_tensor(table: pa.Table, name: str) -> torch.Tensor:
    """A column as ``[rows]`` for numbers, ``[rows, ...]`` for lists or tensors of one shape.

    The result lies in the column's memory if that is one chunk, so it must not be written to.

    Raises:
        InvalidInputError: there is no such column, or a model cannot take what is in it.
    """
    if name not in table.column_names:
        raise InvalidInputError(
            f"there is no column {name!r}; the columns are {', '.join(table.column_names)}"
        )
    chunks = [chunk for chunk in table.column(name).chunks if len(chunk)]
    if not chunks:
        raise InvalidInputError(f"column {name!r} is empty")
    parts = [_of_chunk(chunk, name) for chunk in chunks]
    if len({part.shape[1:] for part in parts}) > 1:
        raise _ragged(name)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_chunk(chunk: pa.Array, name: str) -> torch.Tensor:
    rows, kind, shape = len(chunk), chunk.type, None
    _check_whole(chunk, name)
    if isinstance(kind, pa.BaseExtensionType):  # tensors of Ray's, or Arrow's own
        shape = getattr(kind, "shape", None)
        if shape is None or None in shape:
            raise _ragged(name)
        axes = list(range(len(shape)))
        if list(getattr(kind, "permutation", None) or axes) != axes:
            raise InvalidInputError(f"column {name!r} has tensors with permuted dimensions")
        chunk = chunk.storage
    sizes: list[int] = []
    while _is_list(chunk.type):
        lengths = pyarrow.compute.list_value_length(chunk).unique().to_pylist()
        if len(lengths) != 1:
            raise _ragged(name)
        sizes += lengths
        chunk = chunk.flatten()
        _check_whole(chunk, name)
    if pa.types.is_boolean(chunk.type):  # bits
        flat = torch.from_numpy(chunk.to_numpy(zero_copy_only=False).copy())
    elif pa.types.is_integer(chunk.type) or pa.types.is_floating(chunk.type):
        flat = torch.utils.dlpack.from_dlpack(chunk)
    else:
        raise InvalidInputError(
            f"column {name!r} holds {kind}: a model takes numbers, or lists or tensors of them"
        )
    return flat.reshape(rows, *(sizes if shape is None else shape))


def _is_list(kind: pa.DataType) -> bool:
    some = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in some)


def _check_whole(chunk: pa.Array, name: str) -> None:
    if chunk.null_count:
        raise InvalidInputError(
            f"column {name!r} has {chunk.null_count} missing values in a batch of "
            f"{len(chunk)}: fill them, or drop those rows, before"
        )


def _ragged(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"column {name!r} holds lists or tensors of different sizes in one batch: pad them to one "
        "size before, or use batch_size=1"
    )


def results(found: Any, outputs: Columns, rows: int) -> Iterator[tuple[str, pa.Array]]:
    """The columns ``outputs`` and what a model found for them.

    Raises:
        InvalidInputError: the result has other parts, or not one for each of the ``rows``.
    """
    for column, part in _parts(found, outputs):
        if not isinstance(part, torch.Tensor):
            raise InvalidInputError(
                f"the result for column {column!r} is a {type(part).__name__}, no tensor; the "
                f"model returns {_spelled(found)}"
            )
        if part.dim() == 0 or len(part) != rows:
            raise InvalidInputError(
                f"the result for column {column!r} has shape {tuple(part.shape)}, so it is not one "
                f"for each of the {rows} rows"
            )
        yield column, _to_array(part)


def _parts(found: Any, outputs: Columns) -> Iterable[tuple[str, Any]]:
    if isinstance(outputs, str):
        return [(outputs, found)]
    if dataclasses.is_dataclass(found) and not isinstance(found, Mapping):
        found = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    by_name = isinstance(outputs, Mapping)
    if by_name != isinstance(found, Mapping) and not (by_name and hasattr(found, "_asdict")):
        raise InvalidInputError(
            f"the model returns {_spelled(found)}: outputs must be "
            + ("a column for each by its name" if not by_name else "one column, or one for each")
        )
    if isinstance(outputs, Mapping):
        named = found._asdict() if hasattr(found, "_asdict") else found
        for name in outputs:
            if name not in named:
                raise InvalidInputError(f"the model returns {_spelled(found)}, and no {name!r}")
        return [(column, named[name]) for name, column in outputs.items()]
    if not isinstance(found, tuple | list) or len(found) != len(outputs):
        raise InvalidInputError(
            f"the model returns {_spelled(found)}, and outputs names {len(outputs)} columns"
        )
    return list(zip(outputs, found, strict=True))


def _spelled(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"{', '.join(map(repr, found))} by name"
    if isinstance(found, tuple | list):
        return f"{len(found)} results"
    return f"one {type(found).__name__}"


def _to_array(tensor: torch.Tensor) -> pa.Array:
    if tensor.dtype is torch.bfloat16:  # of which Arrow knows nothing
        tensor = tensor.float()
    values = tensor.contiguous().numpy()
    return pa.array(values) if values.ndim == 1 else ArrowTensorArray.from_numpy(values)
