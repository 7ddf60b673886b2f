"""Kinds of values in a result, told apart by their size, which are judged each by itself.

A detector's boxes are hundreds of pixels, and the scores beside them less than one: of all the
noise of such a result that of the scores is nothing, and decides everything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from x86quant.calling.running import flat_floats, float_tensors
from x86quant.observing.observer import LARGEST

#: Between the root mean squares of two kinds no other one is, and they differ by this factor.
_APART = 16.0
#: What is so many times smaller than the largest is taken for nothing.
_NOTHING = 1e6
#: Of more channels only probabilities are told from the rest: some of many are small by chance.
_MOST_CHANNELS = 32
#: Of probabilities, which a sigmoid or a softmax makes, a smaller share is 0.
_FEW_ZEROS = 0.01
#: Of a tensor so many values tell their size.
_ENOUGH = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """Values that are not told apart any further: a tensor, or some of its channels.

    Attributes:
        tensor: the number of the tensor in the result.
        dim: along which channels lie; None of all of the tensor.
        channels: which ones.
        size: their root mean square.
        count: how many they are.
    """

    tensor: int
    dim: int | None
    channels: tuple[int, ...]
    size: float
    count: int

    @property
    def power(self) -> float:
        """The sum of their squares."""
        return self.size**2 * self.count


#: Values of like size.
Kind = tuple[Values, ...]


def kinds_within(tensors: Sequence[torch.Tensor]) -> tuple[Kind, ...]:
    """The kinds of channels in one tensor of the result, over some calls; none if all are alike."""
    kinds = _apart(_values(0, tensors))
    return kinds if len(kinds) > 1 else ()


def _apart(values: Collection[Values]) -> tuple[Kind, ...]:
    """``values`` by size, the smallest first; without what is nothing."""
    largest = max((x.size for x in values), default=0.0)
    counted = sorted((x for x in values if x.size > largest / _NOTHING), key=lambda x: x.size)
    found: list[list[Values]] = []
    for one in counted:
        if not found or one.size > _APART * found[-1][-1].size:
            found.append([])
        found[-1].append(one)
    return tuple(map(tuple, found))


def _values(number: int, tensors: Sequence[torch.Tensor]) -> list[Values]:
    """What is told apart in one tensor of the result: channels where some differ much."""
    rank = tensors[0].dim()
    alike = all(x.dim() == rank for x in tensors)
    for dim in sorted({1, rank - 1}) if alike and rank > 1 else ():
        if len({x.shape[dim] for x in tensors}) == 1 and tensors[0].shape[dim] > 1:
            found = _channels(number, tensors, dim)
            if len(_apart(found)) > 1:
                return found
    rows = torch.cat([_rows(x.reshape(1, -1), 0) for x in tensors], 1)
    return [Values(number, None, (), _sizes(rows)[0], sum(x.numel() for x in tensors))]


def _channels(number: int, tensors: Sequence[torch.Tensor], dim: int) -> list[Values]:
    """Each channel, or of many those that hold probabilities and the others."""
    rows = torch.cat([_rows(x, dim) for x in tensors], 1)
    if not rows.numel():
        return []
    likely = (rows.amin(1) >= 0) & (rows.amax(1) <= 1)
    if bool(likely.all()):  # what is small is unlikely there, and no kind of its own
        return []
    if len(rows) > _MOST_CHANNELS and not _are_a_kind(likely, rows):
        return []
    groups = [likely.nonzero().flatten().tolist()]
    others = (~likely).nonzero().flatten().tolist()
    groups += [[x] for x in others] if len(rows) <= _MOST_CHANNELS else [others]
    sizes = _sizes(rows)
    count = sum(x.numel() for x in tensors) // len(rows)
    return [
        Values(number, dim, tuple(some), _together([sizes[x] for x in some]), len(some) * count)
        for some in groups
        if some
    ]


def _are_a_kind(likely: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the ``likely`` ones of ``rows`` are probabilities: they lie together, or none is 0.

    Features behind a ReLU that calibration hardly showed are within 0 and 1, too, here and there.
    """
    runs = int(likely[0]) + int((likely[1:] & ~likely[:-1]).sum())
    together = 2 * runs <= min(int(likely.sum()), int((~likely).sum()))
    return together or float((rows[likely] == 0).double().mean()) < _FEW_ZEROS


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Values of each channel, evenly chosen where they are many."""
    x = x.movedim(dim, 0)
    while x.numel() > _ENOUGH and max(x.shape[1:]) > 1:
        longest = max(range(1, x.dim()), key=lambda d: x.shape[d])
        x = x[(slice(None),) * longest + (slice(None, None, 2),)]
    return x.flatten(1)


def _sizes(rows: torch.Tensor) -> list[float]:
    """The root mean square of each row, without what has no bounds."""
    values = torch.nan_to_num(rows.double(), 0.0, 0.0, 0.0)
    squares = values.where(values.abs() < LARGEST, 0.0).square()
    found: list[float] = squares.mean(1).sqrt().nan_to_num().tolist()
    return found


def _together(sizes: Sequence[float]) -> float:
    return math.sqrt(math.fsum(size**2 for size in sizes) / len(sizes))


class EvenValues:
    """Results as one vector each, in which every kind of values counts alike.

    Args:
        results: some of the float model's, which kinds are told by.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self._factors = _factors([float_tensors(x) for x in results])

    def flat(self, result: Any) -> torch.Tensor:
        """All float tensors in a result, each kind of values as large as the others."""
        return flat_floats(result, self._weighted if self._factors else None)

    def _weighted(self, number: int, x: torch.Tensor) -> torch.Tensor:
        if number not in self._factors:
            return x
        dim, factors = self._factors[number]
        if dim is None:
            return x * float(factors)
        if x.dim() <= dim or x.shape[dim] != len(factors):
            return x
        return x * factors.to(x.dtype).view(-1, *(1,) * (x.dim() - dim - 1))


def _factors(
    results: Sequence[Sequence[torch.Tensor]],
) -> dict[int, tuple[int | None, torch.Tensor]]:
    """By number of tensor, what channels along a dimension, or all values, are multiplied by."""
    if not results or len({len(x) for x in results}) > 1:
        return {}
    tensors = list(zip(*results, strict=True))
    kinds = _apart([one for n, of_calls in enumerate(tensors) for one in _values(n, of_calls)])
    if len(kinds) < 2:
        return {}
    factors: dict[int, tuple[int | None, torch.Tensor]] = {}
    powers = [math.fsum(x.power for x in kind) for kind in kinds]
    for kind, power in zip(kinds, powers, strict=True):
        for one in kind:  # of a tensor all or channels along one dimension
            size = 1 if one.dim is None else tensors[one.tensor][0].shape[one.dim]
            plain = torch.ones(size, dtype=torch.float32)
            _, found = factors.setdefault(one.tensor, (one.dim, plain))
            found[list(one.channels) or 0] = math.sqrt(max(powers) / power)
    return factors
