"""Which sizes of inputs are those of a batch, and what code may count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from x86quant.forms.size_conditions import Place


def batch_sizes(example: Sequence[torch.Tensor]) -> set[Place]:
    """Where inputs have the size of a batch: in front, or, of indices of many tables, behind it."""
    rows = next((len(x) for x in example if x.dim()), None)
    found: set[Place] = set()
    for i, x in enumerate(example):
        stacked = not x.is_floating_point() and x.dim() > 1 and len(x) != rows
        dims = range(1, x.dim()) if stacked else range(min(1, x.dim()))
        found.update((i, dim) for dim in dims)
    return found


def count_of(value: Any) -> int | None:
    """How many parts or rows ``value`` has, or the number that it is; None if it has neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | torch.SymInt):
        return int(value)
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    return len(value) if isinstance(value, tuple | list) else None
