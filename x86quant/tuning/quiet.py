"""Was the machine quiet enough for times to mean something?

A loop of fixed work is timed many times. On a quiet machine every turn takes the same, and a
process that wants to compute does compute. What it waits for the CPU, and what the system's own
counters say others took, is noise that no number of rounds removes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path

#: Above these the measurements are marked as noisy.
MOST_JITTER = 0.15
MOST_WAITING = 0.05
MOST_STOLEN = 0.02

_TURNS = 200
_WORK = 20_000


@dataclasses.dataclass(frozen=True)
class Quiet:
    """Shares of time.

    Attributes:
        jitter: how much longer a slow turn (the 90th percentile) takes than a usual one.
        waiting: share of the loop's time that it was not running.
        stolen: share of the machine's time that the hypervisor gave to others.
    """

    jitter: float
    waiting: float
    stolen: float

    @property
    def enough(self) -> bool:
        """Whether times taken now mean something."""
        return (
            self.jitter <= MOST_JITTER
            and self.waiting <= MOST_WAITING
            and self.stolen <= MOST_STOLEN
        )

    def worse(self, other: Quiet) -> Quiet:
        """The worse of two looks, figure by figure."""
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Quiet(*map(max, mine, theirs))

    def __str__(self) -> str:
        return (
            f"{'yes' if self.enough else 'no'} (jitter {self.jitter:.0%}, waiting "
            f"{self.waiting:.0%}, stolen {self.stolen:.0%})"
        )


def look() -> Quiet:
    """Look at the machine for about a tenth of a second."""
    before = _cpu_times()
    wall, mine = time.perf_counter(), time.thread_time()
    turns = [_turn() for _ in range(_TURNS)]
    wall, mine = time.perf_counter() - wall, time.thread_time() - mine
    return judge(turns, wall, mine, before, _cpu_times())


def judge(
    turns: list[float],
    wall: float,
    mine: float,
    before: tuple[float, float],
    after: tuple[float, float],
) -> Quiet:
    """What the times of the turns, the clocks and the counters (stolen, total) say."""
    slow = statistics.quantiles(turns, n=10)[-1]
    total = after[1] - before[1]
    return Quiet(
        jitter=max(slow / statistics.median(turns) - 1, 0.0),
        waiting=max(1 - mine / wall, 0.0),
        stolen=(after[0] - before[0]) / total if total > 0 else 0.0,
    )


def _turn() -> float:
    start = time.perf_counter()
    sum(range(_WORK))
    return time.perf_counter() - start


def _cpu_times() -> tuple[float, float]:
    """Time stolen and time in all, in ticks; zeros where the system does not say."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0.0, 0.0
    ticks = [float(word) for word in line.split()[1:9]]  # user … softirq, steal
    return (ticks[7] if len(ticks) > 7 else 0.0), sum(ticks)
