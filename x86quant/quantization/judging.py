"""How close the int8 model's results come to the float model's, by group of channels and in words.

One figure for a whole tensor hides a bad part of it: a detector's boxes are hundreds of pixels, and
the scores beside them less than one. So channels of like size are judged together as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from x86quant.calling.call import dense
from x86quant.calling.running import SIGNS
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.kinds_of_values import kinds_within

#: What is told of besides the whole is so many dB below it.
_MUCH_WORSE_DB = 6.0
#: Agreement of the largest of a row is told of rows of at least so many values, if there are so
#: many rows.
_FEWEST_CLASSES, _FEWEST_ROWS = 2, 16


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelGroup:
    """Signal to noise of a part of one result.

    Attributes:
        sqnr_db: in dB.
        channels: which channels, or columns of the last dimension.
    """

    sqnr_db: float
    channels: str

    def __str__(self) -> str:
        return f"{self.channels}: {self.sqnr_db:.1f} dB"


def worst_group(
    exact: Sequence[torch.Tensor], actual: Sequence[torch.Tensor], whole_db: float
) -> ChannelGroup | None:
    """The channels of one result, over some calls, that are furthest from the float model's.

    None if no channels are much further from it than all of the tensor, of ``whole_db``.
    """
    groups = _groups([dense(x) for x in exact], [dense(y) for y in actual])
    found = min(groups, key=lambda group: group.sqnr_db, default=None)
    return None if found is None or found.sqnr_db > whole_db - _MUCH_WORSE_DB else found


def _groups(
    exact: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]
) -> Iterator[ChannelGroup]:
    for kind in kinds_within(exact):
        dim = kind[0].dim
        assert dim is not None
        channels = sorted(channel for values in kind for channel in values.channels)
        here = torch.tensor(channels, dtype=torch.int64)
        parts = ([x.index_select(dim, here) for x in side] for side in (exact, actual))
        what = "channels" if dim == 1 and exact[0].dim() > 2 else "columns"
        yield ChannelGroup(sqnr_between(*parts), f"{what} {_listed(channels)}")


def _are_probabilities(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every value is between none and one: what is small there is unlikely, not fine."""
    return all(bool((x >= 0).all()) and bool((x <= 1).all()) for x in tensors)


def _listed(channels: list[int]) -> str:
    """``0-3, 7``, at most a few."""
    runs: list[list[int]] = []
    for channel in channels:
        if runs and channel == runs[-1][1] + 1:
            runs[-1][1] = channel
        else:
            runs.append([channel, channel])
    told = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    more = f" and {len(told) - 4} more ranges" if len(told) > 4 else ""
    return f"{', '.join(told[:4])}{more}"


def top_agreement(
    exact: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]
) -> tuple[float, int] | None:
    """In which share of the rows the largest value is the same one, and of how many rows.

    A row lies along the last dimension of a matrix, and in tensors of more dimensions where
    probabilities, or their logarithms, sum to one. None where results are no rows of classes, or
    too few.
    """
    dim = _classes(exact)
    if dim is None:
        return None
    same = [x.argmax(dim) == y.argmax(dim) for x, y in zip(exact, actual, strict=True)]
    return _share(torch.cat([x.flatten() for x in same]))


def _classes(tensors: Sequence[torch.Tensor]) -> int | None:
    """The dimension along which classes lie."""
    first = tensors[0]
    if any(x.layout is not torch.strided or x.dim() != first.dim() for x in tensors):
        return None
    for dim in range(first.dim() - 1, 0, -1):
        is_classes = first.dim() == 2 or _sums_to_one(first, dim)
        if is_classes and all(x.shape[dim] >= _FEWEST_CLASSES for x in tensors):
            return dim
    return None


def _sums_to_one(x: torch.Tensor, dim: int) -> bool:
    """Whether probabilities, or logarithms of some, lie along ``dim``."""
    if bool((x <= 0).all()):
        x = x.exp()
    if not bool((x >= 0).all()):
        return False
    return bool(((x.sum(dim) - 1).abs() < 1e-3).all())


def half_agreement(
    exact: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]
) -> tuple[float, int] | None:
    """Of the probabilities above one half in either result, the share that is so in both.

    And of how many. None where results are no probabilities that each stand for themselves, or
    too few are above.
    """
    if _classes(exact) is not None or any(x.layout is not torch.strided for x in exact):
        return None
    if not _are_probabilities(exact):
        return None
    above = [torch.cat([x.flatten() > 0.5 for x in side]) for side in (exact, actual)]
    return _share((above[0] & above[1])[above[0] | above[1]])


def place_agreement(
    exact: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]
) -> tuple[float, int] | None:
    """In which share of the places both results, as signs, are the same; and of how many."""
    same = [x == y for x, y in zip(exact, actual, strict=True)]
    return _share(torch.cat([x.view(-1, SIGNS).all(1) for x in same]))


def _share(same: torch.Tensor) -> tuple[float, int] | None:
    """The share of what is true, and of how many; None if those are too few."""
    return (float(same.double().mean()), same.numel()) if same.numel() >= _FEWEST_ROWS else None


#: From so many dB on, and what a user will see there.
_WORDS = (
    (40.0, "hardly a difference is to be seen"),
    (30.0, "differences of a few percent in single values"),
    (20.0, "small differences in most values; decisions hardly change"),
    (10.0, "values differ clearly: decisions that are close turn out otherwise"),
    (-float("inf"), "the results are another model's"),
)


def in_words(sqnr_db: float) -> str:
    """What a signal to noise means for who uses the results."""
    return next(text for least, text in _WORDS if sqnr_db >= least)
