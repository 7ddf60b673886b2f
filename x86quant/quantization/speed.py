"""Whether int8 loses time: both forms take turns, a second at most; noise decides nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from x86quant import extension
from x86quant.errors import ExtensionError
from x86quant.quantization.batches import Call
from x86quant.quantization.running import feed, no_fast_path

#: Int8 has lost if both its median and its least time are so many times those of float.
_CLEARLY = 1.1
#: Seconds for the whole model, and for all of its parts together.
_WHOLE, _PARTS = 0.4, 0.4
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 40


def can_tell() -> bool:
    """Whether int8 runs natively here, so that its time means something."""
    try:
        extension.load()
    except ExtensionError:
        return False
    return True


def slower(
    exact: Callable[..., Any], int8: Callable[..., Any], call: Call, seconds: float = _WHOLE
) -> float | None:
    """How many times as long ``int8`` takes as ``exact``, if it clearly takes longer."""
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for function in (exact, int8):
            call.copied()(function)
        started = perf_counter()
        while len(times[0]) < _LEAST_ROUNDS or perf_counter() - started < seconds:
            for function, taken in zip((exact, int8), times, strict=True):
                given = call.copied()
                start = perf_counter()
                given(function)
                taken.append(perf_counter() - start)
            if len(times[0]) == _MOST_ROUNDS or perf_counter() - started > 2 * seconds:
                break
    ratios = [statistics.median(times[1]) / statistics.median(times[0])]
    ratios.append(min(times[1]) / min(times[0]))
    return min(ratios) if min(ratios) > _CLEARLY else None


def by_part(
    exact: nn.Module, int8: nn.Module, call: Call, paths: Sequence[str]
) -> dict[str, float | None]:
    """For each part, by path, what :func:`slower` says, on what it gets in the float model."""
    calls: dict[str, Call] = {}

    def keeping(path: str) -> Callable[[Call], Any]:
        return lambda given: calls.setdefault(path, given.copied())

    feed(exact, [call], {path: keeping(path) for path in paths})
    found: dict[str, float | None] = {}
    with no_fast_path():
        for path, given in calls.items():
            forms = (exact.get_submodule(path), int8.get_submodule(path))
            found[path] = slower(*forms, given, _PARTS / len(calls))
    return found
