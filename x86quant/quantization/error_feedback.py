"""Codes of 4 bits that make up for each other's rounding, by what a layer is given (GPTQ).

Column after column of a weight is rounded, and what that changes in the results on sample rows is
taken off the columns that are still to come. Scales come first: those that change the weights
least, where an error counts as much as its feature is large in the samples.

Half of the rows of each call choose the codes, the others judge them: a layer keeps plain rounding
where that is closer to the float layer on rows that were not looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import feed
from x86quant.dynamic.group_weights import (
    GROUP,
    codes_at,
    group_of,
    packed,
    quantize_groups,
)
from x86quant.dynamic.layers import weight_of
from x86quant.ops.groups import real_weight

Operands = tuple[torch.Tensor, torch.Tensor]

#: What is added to the squares of all features, as a share of their mean: samples are few.
_DAMPING = 0.01
#: Columns whose changes are collected before they are taken off all that follow.
_BLOCK = 64
#: Bytes of the squares of layers that are looked at in one run of the samples.
_TOGETHER = 1 << 30
_MOST_ROWS = 4096


@dataclasses.dataclass(eq=False)
class Squares:
    """Sums of products of the features of a layer's inputs, [K, K]: of some rows and of others."""

    chosen_by: torch.Tensor
    judged_by: torch.Tensor
    rows: int = 0

    def take(self, call: Call) -> None:
        """Take the rows that a call of the layer gives it, by turns."""
        x = call.args[0] if call.args else None
        if not isinstance(x, torch.Tensor):
            return
        rows = x.detach().reshape(-1, x.shape[-1]).float()[: max(0, _MOST_ROWS - self.rows)]
        self.rows += len(rows)
        for products, some in ((self.chosen_by, rows[::2]), (self.judged_by, rows[1::2])):
            products.addmm_(some.t(), some)

    def error_of(self, off: torch.Tensor, *, judging: bool) -> float:
        """The squared error of results where a weight is ``off`` by so much [N, K]."""
        products = self.judged_by if judging else self.chosen_by
        return float(((off @ products) * off).sum())


def with_error_feedback(
    model: nn.Module, names: Sequence[str], sample: Sequence[Call], bits: int
) -> dict[str, Operands]:
    """Codes and scales of ``bits`` for those linears called ``names`` that gain by it.

    Args:
        model: a float model in evaluation mode, which is run on ``sample``.
        names: linears in it.
        sample: typical calls.
        bits: of a code.
    """
    found: dict[str, Operands] = {}
    for name, seen in squares(model, names, sample):
        weight = weight_of(model.get_submodule(name)).detach()
        group = group_of(weight.shape[1])
        if group is None or seen.rows < 2:
            continue
        operands = rounded_with_feedback(weight, seen.chosen_by, bits, group)
        plain = quantize_groups(weight, bits, group)
        errors = (seen.error_of(weight - real_weight(*x), judging=True) for x in (operands, plain))
        if next(errors) < next(errors):
            found[name] = operands
    return found


def squares(
    model: nn.Module, names: Sequence[str], sample: Sequence[Call]
) -> Iterator[tuple[str, Squares]]:
    """What the linears called ``names`` are given on ``sample``, of some at a time."""
    for some in _batches(model, names):
        yield from _watched(model, some, sample).items()


def _batches(model: nn.Module, names: Sequence[str]) -> Iterator[list[str]]:
    """``names`` in lists whose squares fit the memory for them."""
    some: list[str] = []
    held = 0
    for name in names:
        size = 8 * weight_of(model.get_submodule(name)).shape[1] ** 2
        if some and held + size > _TOGETHER:
            yield some
            some, held = [], 0
        some.append(name)
        held += size
    if some:
        yield some


def _watched(
    model: nn.Module, names: Sequence[str], sample: Sequence[Call]
) -> Mapping[str, Squares]:
    """What the layers called ``names`` are given on ``sample``."""
    found: dict[str, Squares] = {}
    for name in names:
        features = weight_of(model.get_submodule(name)).shape[1]
        found[name] = Squares(*torch.zeros(2, features, features, dtype=torch.float32))
    feed(model, sample, {name: squares.take for name, squares in found.items()})
    return found


def rounded_with_feedback(
    weight: torch.Tensor, squares: torch.Tensor, bits: int, group: int = GROUP
) -> Operands:
    """Codes and scales of ``weight`` [N, K], given the products of its inputs' features [K, K]."""
    features = weight.shape[1]
    sizes = squares.diagonal().clone()
    _, scales = quantize_groups(weight, bits, group, importance(sizes))
    steps = scales.float().repeat_interleave(group, 1)
    spread = _spread(squares, sizes)
    left = weight.float().clone()
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for first in range(0, features, _BLOCK):
        last = min(first + _BLOCK, features)
        changes = left.new_empty(len(weight), last - first)
        for column in range(first, last):
            code = codes_at(left[:, column], steps[:, column], bits)
            codes[:, column] = code
            change = (left[:, column] - code * steps[:, column]) / spread[column, column]
            left[:, column:last] -= change[:, None] * spread[column, column:last]
            changes[:, column - first] = change
        left[:, last:] -= changes @ spread[first:last, last:]
    return packed(codes, bits), scales


def importance(sizes: torch.Tensor) -> torch.Tensor:
    """What an error of each feature counts; features that are always 0 count a little."""
    mean = sizes.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return sizes / mean + _DAMPING


def _spread(squares: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of ``squares``: who makes up for whom."""
    damped = squares.double()
    mean = sizes.double().mean()
    damped.diagonal().add_(_DAMPING * (mean if mean > 0 else 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
