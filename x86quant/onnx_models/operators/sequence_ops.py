"""Sequences of tensors, as lists."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.onnx_models.operator_table import numbers_of, operator


@operator("SequenceConstruct")
def sequence_construct(*xs: Any) -> Any:
    """A list of tensors."""
    return list(xs)


@operator("SequenceEmpty")
def sequence_empty(*, dtype: int = 1) -> Any:
    """A list of none."""
    return []


def _place(position: Any, usual: int) -> int:
    if position is None:
        return usual
    return position if isinstance(position, int) else int(position.item())


@operator("SequenceInsert", scalars=(2,))
def sequence_insert(values: Any, x: Any, position: Any = None) -> Any:
    """One more."""
    place = _place(position, len(values))
    place = place + len(values) if place < 0 else place
    return [*values[:place], x, *values[place:]]


@operator("SequenceErase", scalars=(1,))
def sequence_erase(values: Any, position: Any = None) -> Any:
    """One less."""
    place = _place(position, -1) % len(values)
    return [*values[:place], *values[place + 1 :]]


@operator("SequenceAt", scalars=(1,))
def sequence_at(values: Any, position: Any) -> Any:
    """One of them."""
    return values[_place(position, 0)]


@operator("SequenceLength")
def sequence_length(values: Any) -> Any:
    """How many there are."""
    return torch.tensor(len(values), dtype=torch.int64)


@operator("SplitToSequence", numbers=(1,))
def split_to_sequence(x: Any, sizes: Any = None, *, axis: int, keepdims: int) -> Any:
    """Parts, or single places, along ``axis``."""
    if sizes is None:
        parts = list(torch.split(x, 1, axis))
        return parts if keepdims else [part.squeeze(axis) for part in parts]
    if isinstance(sizes, torch.Tensor) and sizes.dim() == 0:
        return list(torch.split(x, int(sizes.item()), axis))
    return list(torch.split(x, numbers_of(sizes), axis))


@operator("ConcatFromSequence")
def concat_from_sequence(values: Any, *, axis: int, new_axis: int) -> Any:
    """All of them in one tensor."""
    return torch.stack(list(values), axis) if new_axis else torch.cat(list(values), axis)
