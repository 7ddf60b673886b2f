"""Timing that is fair on a shared machine: candidates take turns, and medians are compared.

Clock, caches and neighbours change within seconds. If candidates were timed one after another, the
one that ran in a quiet moment would win; timed in turn, all of them meet the same moments.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from time import perf_counter

from x86quant.errors import InvalidInputError


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call took, over all rounds."""

    median: float
    minimum: float
    rounds: int


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    calls: int = 1,
    warmup: int = 3,
) -> dict[str, Timing]:
    """Time every function once a round, in turn, for many rounds.

    Each round starts with the next function, so that none always runs in the caches that the same
    neighbour leaves behind.

    Args:
        functions: what to time, by name; called without arguments.
        rounds: how many times each is measured.
        calls: calls a measurement; raise it for functions of a few microseconds.
        warmup: untimed calls of each beforehand (lazy packing, allocation, JIT).

    Returns:
        A :class:`Timing` for each name, in the order given.
    """
    if not functions:
        raise InvalidInputError("there is nothing to time: give at least one function")
    if rounds < 1 or calls < 1 or warmup < 0:
        raise InvalidInputError(
            "rounds and calls must be at least 1 and warmup at least 0, "
            f"not rounds={rounds}, calls={calls}, warmup={warmup}"
        )
    names = list(functions)
    for name in names:
        for _ in range(warmup):
            functions[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_time(functions[name], calls))
    return {
        name: Timing(statistics.median(taken), min(taken), rounds)
        for name, taken in seconds.items()
    }


def _time(function: Callable[[], object], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        function()
    return (perf_counter() - start) / calls
