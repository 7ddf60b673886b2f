"""Whether one file of results is faster than another, or only differs by noise.

Each call's time is kept, so the median's own uncertainty can be told: by resampling blocks of
neighbouring calls, since what disturbs one call disturbs its neighbours too. What differs from one
process to the next (where memory lies, what else runs) no resampling within one can show:
differences below ``LEAST`` are never called differences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import numpy

from x86quant.bench.results import BenchResults, ModelRun, RunSetting
from x86quant.errors import InvalidInputError

#: As a ratio less 1.
LEAST = 0.01
#: Below so many calls a median says nothing.
LEAST_CALLS = 6
_RESAMPLES = 2000
_AT_ONCE = 4_000_000  # values in memory
# A file has many medians: at 0.95 one in ten of those without a difference would show one.
_CONFIDENCE = 0.99

Outcome = Literal["faster", "slower", "no difference", "too few rounds", "gone", "new", "neither"]


@dataclasses.dataclass(frozen=True)
class SpeedVerdict:
    """One back end on one model at one setting, before and after.

    Attributes:
        change: the time after over the time before, less 1; negative is faster.
        low: the lower end of what it may be.
        high: the upper end.
        reason: why it did not run.
    """

    model: str
    setting: RunSetting
    backend: str
    outcome: Outcome
    change: float = 0.0
    low: float = 0.0
    high: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        if self.outcome in ("gone", "new", "neither"):
            told = {"gone": "no longer runs", "new": "runs now", "neither": "ran in neither"}
            return told[self.outcome] + (f": {self.reason}" if self.reason else "")
        if self.outcome == "too few rounds":
            return f"too few rounds to tell ({LEAST_CALLS // 2} or more are needed)"
        span = f"{_percent(self.low)} to {_percent(self.high)}"
        if self.outcome == "no difference":
            return f"no difference found ({span})"
        if self.outcome == "faster":  # told as what is saved, smallest first
            return f"faster by {-self.change:.1%} ({-self.high:.1%} to {-self.low:.1%})"
        return f"slower by {self.change:.1%} ({self.low:.1%} to {self.high:.1%})"


def _percent(value: float) -> str:
    return f"{value:+.1%}"


def compare_results(
    before: BenchResults,
    after: BenchResults,
    *,
    across: bool = False,
    only: Collection[str] = (),
) -> list[SpeedVerdict]:
    """A verdict for all that is in either.

    Args:
        before: the base line.
        after: what is judged.
        across: compare results of different CPUs too.
        only: the back ends to look at; all by default.

    Raises:
        InvalidInputError: the CPUs differ, or there is nothing in common.
    """
    cpus = [results.environment.get("cpu", "an unknown CPU") for results in (before, after)]
    if cpus[0] != cpus[1] and not across:
        raise InvalidInputError(
            f"the results are of different CPUs, {cpus[0]} and {cpus[1]}: "
            "compare them with --across if that is what you want to know"
        )
    verdicts = list(_verdicts(before, after, only))
    if not verdicts:
        raise InvalidInputError("the two have no model, setting and back end in common")
    return verdicts


def differing_environment(before: BenchResults, after: BenchResults) -> list[str]:
    """What else changed between the two."""
    one, two = before.environment, after.environment
    names = sorted({*one, *two} - {"date", "command"})
    return [
        f"{name}: {one.get(name, 'none')} → {two.get(name, 'none')}"
        for name in names
        if one.get(name) != two.get(name)
    ]


def _verdicts(
    before: BenchResults, after: BenchResults, only: Collection[str]
) -> Iterator[SpeedVerdict]:
    first = {(run.model, run.setting): run for run in before.runs}
    second = {(run.model, run.setting): run for run in after.runs}
    for key in first:
        if key not in second:
            continue
        one, two = first[key], second[key]
        for name in dict.fromkeys([*one.results, *two.results]):
            if not only or name in only:
                yield _verdict(one, two, name)


def _verdict(before: ModelRun, after: ModelRun, name: str) -> SpeedVerdict:
    one, two = before.measured(name), after.measured(name)
    about = (before.model, before.setting, name)
    if one is None or two is None:
        missing = (after if one is not None else before).results.get(name)
        reason = missing.reason if missing is not None else "not measured"
        outcome: Outcome = "gone" if one is not None else "new" if two is not None else "neither"
        return SpeedVerdict(*about, outcome, reason=reason)
    if min(len(one.seconds), len(two.seconds)) < LEAST_CALLS:
        return SpeedVerdict(*about, "too few rounds")
    change, low, high = change_of_median(one.seconds, two.seconds)
    found: Outcome = "no difference"
    if abs(change) >= LEAST and (low > 0 or high < 0):
        found = "slower" if change > 0 else "faster"
    return SpeedVerdict(*about, found, change, low, high)


def change_of_median(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """The change of the median as a ratio less 1, and the ends of its interval of confidence."""
    generator = numpy.random.default_rng(0)  # the same files, the same verdict
    ratios = _medians(after, generator) / _medians(before, generator)
    tail = (1 - _CONFIDENCE) / 2
    low, high = numpy.quantile(ratios, [tail, 1 - tail])
    change = float(numpy.median(after) / numpy.median(before))
    return change - 1, min(float(low), change) - 1, max(float(high), change) - 1


def _medians(seconds: Sequence[float], generator: numpy.random.Generator) -> numpy.ndarray:
    """Of many resamples in blocks, which wrap around."""
    values = numpy.asarray(seconds)
    block = numpy.arange(max(1, math.isqrt(len(values))))
    blocks = -(-len(values) // len(block))
    starts = generator.integers(0, len(values), (_RESAMPLES, blocks, 1))
    parts = numpy.array_split(starts, 1 + _RESAMPLES * len(values) // _AT_ONCE)
    medians = [
        numpy.median(values[(part + block) % len(values)].reshape(len(part), -1), axis=1)
        for part in parts
    ]
    return numpy.concatenate(medians)


def slower_than(verdicts: Sequence[SpeedVerdict], limit: float) -> list[SpeedVerdict]:
    """Those that are surely slower, and by ``limit`` or more; and those that no longer run."""
    return [
        verdict
        for verdict in verdicts
        if verdict.outcome == "gone" or (verdict.outcome == "slower" and verdict.change >= limit)
    ]
