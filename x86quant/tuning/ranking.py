"""Timing in turn until the ranking is settled, and what may be said of the result.

Candidates take turns, a block of calls each, so that all meet the same moments of a busy machine.
After a few rounds the 95% confidence intervals of the medians say which of them still matter: one
whose interval lies above the best one's is slower, one that is wholly within ``TIE`` of the best
is as good. Only what is neither goes on.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from x86quant.tuning.measurements import TIE

#: Seconds for one block: long enough for the clock, short enough to take many.
BLOCK = 150e-6
#: Seconds for which a busy machine may keep a process from running. A candidate that takes longer
#: than this is slow itself.
LONGEST_STALL = 0.25
_MOST_CALLS = 64
# A median of fewer rounds has no 95% interval.
_FIRST_LOOK = 3
_FEWEST_ROUNDS = 9
_MOST_ROUNDS = 61
_LOOK_EVERY = 4
# Beyond these factors a candidate is out of the race at once, after the first look, or after the
# fewest rounds; closer ones stay, since the best may turn out slower yet.
_HOPELESS_AT_ONCE = 8.0
_HOPELESS = 2.0
_BEATEN = 1.15

#: Seconds a call took, of a number of calls.
Block = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Timed:
    """Seconds a call took: median, its 95% confidence interval, the fastest round."""

    median: float
    low: float
    high: float
    fastest: float
    rounds: int


def summary(seconds: Sequence[float]) -> Timed:
    """What a sample says of its median; below six rounds the interval is the whole range."""
    ordered = sorted(seconds)
    n = len(ordered)
    skip = _ranks_outside(n)
    return Timed(statistics.median(ordered), ordered[skip], ordered[n - 1 - skip], ordered[0], n)


def _ranks_outside(n: int) -> int:
    """How many of ``n`` sorted values lie outside the 95% interval of the median, on each side.

    The number of values below the true median is binomial with probability one half, whatever
    their distribution.
    """
    skip, below = 0, 1  # of 2**n outcomes, those with at most `skip` values below the median
    while below + math.comb(n, skip + 1) <= 0.025 * 2**n:
        skip += 1
        below += math.comb(n, skip)
    return skip


def ties(timed: Mapping[str, Timed]) -> frozenset[str]:
    """Those as good as the best: intervals overlap, or medians within ``TIE``; none if alone."""
    best = min(timed.values(), key=lambda t: t.median, default=None)
    if best is None:
        return frozenset()
    equal = {
        name
        for name, t in timed.items()
        if t.low <= best.high or t.median <= best.median * (1 + TIE)
    }
    return frozenset(equal) if len(equal) > 1 else frozenset()


def settle(
    blocks: Mapping[str, Block],
    *,
    limit: float,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Timed]:
    """Time ``blocks`` in turn until their ranking is settled or ``limit`` seconds are over.

    Every candidate is timed at least once, whatever the limit, and one that is hopeless not more.
    """
    first_calls = {name: _warm_up(block) for name, block in blocks.items()}
    quickest = min(first_calls.values(), default=0.0)
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    racing = []
    for name, once in first_calls.items():
        bound = max(_HOPELESS_AT_ONCE * quickest, BLOCK)
        if bound < once < LONGEST_STALL:
            once = first_calls[name] = min(once, blocks[name](1))
        if once > bound:
            seconds[name].append(once)
        else:
            racing.append(name)
    calls = {name: max(1, min(_MOST_CALLS, round(BLOCK / first_calls[name]))) for name in racing}
    end = clock() + limit
    for done in range(_MOST_ROUNDS):
        first = done % len(racing) if racing else 0
        for name in racing[first:] + racing[:first]:
            seconds[name].append(blocks[name](calls[name]))
        if clock() >= end:
            break
        racing = _still_racing(seconds, racing, done + 1)
        if not racing:
            break
    return {name: summary(found) for name, found in seconds.items()}


def _warm_up(block: Block) -> float:
    """Seconds of one call, the better of two if it is short."""
    once = block(1)
    return max(once if once > BLOCK else min(once, block(1)), 1e-9)


def _still_racing(
    seconds: Mapping[str, Sequence[float]], racing: list[str], rounds: int
) -> list[str]:
    """The candidates of the next round; none once the ranking is settled."""
    look = rounds == _FIRST_LOOK or (
        rounds >= _FEWEST_ROUNDS and (rounds - _FEWEST_ROUNDS) % _LOOK_EVERY == 0
    )
    if not look:
        return racing
    timed = {name: summary(seconds[name]) for name in racing}
    best_name = min(racing, key=lambda name: timed[name].median)
    best = timed[best_name]
    if rounds < _FEWEST_ROUNDS:
        return [name for name in racing if timed[name].fastest <= _HOPELESS * best.high]
    rest = [timed[name] for name in racing if name != best_name]
    if all(t.low > best.high or t.high <= best.low * (1 + TIE) for t in rest):
        return []
    return [name for name in racing if timed[name].low <= _BEATEN * best.high]
