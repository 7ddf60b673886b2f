"""Calibration data that does not look like data: what is odd about it, in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from x86quant.calling.call import Call, dense

#: Arguments that say which tokens count, and those that say which do not.
_SHOWS = re.compile("attention_mask$")
_HIDES = re.compile("padding_mask$")
#: Fewer batches may be the same for a trial.
_FEWEST_ALIKE = 4


def what_is_odd(sample: Sequence[Call]) -> Iterator[str]:
    """What a user should be told about the calibration batches ``sample``."""
    yield from _values(sample)
    for name, masks in _by_name(sample).items():
        shows, hides = _SHOWS.search(name), _HIDES.search(name)
        if (shows and not any(bool(x.any()) for x in masks)) or (
            hides and all(x.dtype is torch.bool and bool(x.all()) for x in masks)
        ):
            yield f"{name} hides everything in all of the calibration data"


def _values(sample: Sequence[Call]) -> Iterator[str]:
    """Of the floating-point tensors: whether they differ at all."""
    floats = [dense(x) for call in sample for x in call.leaves if x.is_floating_point()]
    floats = [x for x in floats if x.numel()]
    if not floats:
        return
    if not any(bool(x.any()) for x in floats):
        yield "all values of the calibration data are zero: ranges chosen by them mean nothing"
    elif _all_constant(floats):
        yield (
            "every tensor of the calibration data holds one value throughout: ranges chosen by "
            "such data mean little"
        )
    elif len(sample) >= _FEWEST_ALIKE and _all_alike(sample):
        yield (
            f"all {len(sample)} calibration batches are the same one: ranges fit it, and perhaps "
            "nothing else"
        )


def _all_constant(floats: Sequence[torch.Tensor]) -> bool:
    large = [x for x in floats if x.numel() > 1]
    return bool(large) and all(bool((x == x.flatten()[0]).all()) for x in large)


def _all_alike(sample: Sequence[Call]) -> bool:
    first = sample[0].leaves
    return all(
        len(call.leaves) == len(first)
        and all(
            x is y or (x.shape == y.shape and torch.equal(dense(x), dense(y)))
            for x, y in zip(first, call.leaves, strict=True)
        )
        for call in sample[1:]
    )


def _by_name(sample: Sequence[Call]) -> Mapping[str, list[torch.Tensor]]:
    """The tensors that are given by name."""
    found: dict[str, list[torch.Tensor]] = {}
    for call in sample:
        for name, value in call.kwargs.items():
            if isinstance(value, torch.Tensor) and value.numel():
                found.setdefault(name, []).append(value)
    return found
