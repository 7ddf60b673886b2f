"""The conditions that a fitted rule may be made of.

Bounds are round numbers: a rule then reads well, and hardly moves when a case comes or goes.
Between two measured values the round number nearest their middle is offered.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from x86quant.hardware.cpu import Cpu
from x86quant.spec import OpSpec
from x86quant.tables.conditions import OPS, Condition, parse_condition
from x86quant.tables.features import FEATURES, Feature, Value

Mask = NDArray[np.bool_]

# Sizes: powers of two and the halves between; amounts of work: 1, 2, 5, 10, ...
_SIZES = (*range(1, 9), *(n * 2**power for power in range(2, 16) for n in (3, 4)))
_WORK = tuple(n * 10**power for power in range(3, 13) for n in (1, 2, 5))
_MULTIPLES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_COUNTED = ("in_channels", "out_channels", "groups", "in_per_group", "out_per_group")
# Up to this, a number may be tested for being equal: sides of kernels, strides, few channels.
_SMALL = 16
# Of the CPU, measurements of several machines may differ in this only: levels have a table each.
_OF_CPU = ("vendor",)
# Not tested: who calls has rules of his own, and paddings follow from sides that are tested.
_LEFT_OUT = ("caller", "padding_max", "output_padding_max")


@dataclasses.dataclass(frozen=True)
class Predicate:
    """One elementary condition: on the op, or on a feature.

    Attributes:
        feature: its name; "op" for the kind of op.
        equal: the value it must have; None where bounds or divisors are tested.
        low, high: bounds, both included.
        multiple: it must be divisible by this.
    """

    feature: str
    equal: Value | None = None
    low: int | None = None
    high: int | None = None
    multiple: int | None = None

    def mask(self, values: Sequence[Value | None]) -> Mask:
        """Which of the feature's values it holds for; never for an unknown one."""
        return np.array([value is not None and self.holds(value) for value in values], bool)

    def holds(self, value: Value) -> bool:
        """Whether a known value passes."""
        if self.equal is not None:
            return value == self.equal
        assert isinstance(value, int)
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.multiple is None or value % self.multiple == 0)
        )


@dataclasses.dataclass(frozen=True)
class Offer:
    """Conditions, and a row of ``masks`` for each: which ops it holds for."""

    predicates: tuple[Predicate, ...]
    masks: NDArray[np.bool_]


def offer(ops: Sequence[tuple[OpSpec, Cpu]]) -> Offer:
    """Every condition that tells some of ``ops`` apart; of those that do so alike, the first."""
    found: dict[bytes, tuple[Predicate, Mask]] = {}
    for name, values in _columns(ops).items():
        for predicate in _of_feature(name, values):
            mask = predicate.mask(values)
            if mask.any() and not mask.all():
                found.setdefault(mask.tobytes(), (predicate, mask))
    masks = np.array([mask for _, mask in found.values()], bool).reshape(-1, len(ops))
    return Offer(tuple(predicate for predicate, _ in found.values()), masks)


def _columns(ops: Sequence[tuple[OpSpec, Cpu]]) -> dict[str, list[Value | None]]:
    columns: dict[str, list[Value | None]] = {"op": [spec.op for spec, _ in ops]}
    for name, feature in FEATURES.items():
        if (feature.of != "cpu" or name in _OF_CPU) and name not in _LEFT_OUT:
            columns[name] = [feature.get(spec, cpu) for spec, cpu in ops]
    return columns


def _of_feature(name: str, values: Iterable[Value | None]) -> Iterator[Predicate]:
    known: list[Any] = sorted({value for value in values if value is not None})
    if name == "op" or FEATURES[name].type != "int":
        yield from (Predicate(name, equal=value) for value in known)
        return
    if not FEATURES[name].per_row:
        yield from (Predicate(name, equal=value) for value in known if value <= _SMALL)
    for bound in _bounds_between(known, _WORK if name == "multiply_adds" else _SIZES):
        yield Predicate(name, low=bound)
        yield Predicate(name, high=bound - 1)
    if name in _COUNTED:
        yield from (Predicate(name, multiple=divisor) for divisor in _MULTIPLES)


def _bounds_between(known: Sequence[int], round_numbers: Sequence[int]) -> Iterator[int]:
    """A round number for each gap between neighbours that holds one: ``below < bound <= above``."""
    for below, above in itertools.pairwise(known):
        inside = [n for n in round_numbers if below < n <= above]
        if inside:
            # The middle by ratio; 0 is no size to take a ratio of.
            middle = math.sqrt(max(below, 1) * above)
            yield min(inside, key=lambda n: (abs(math.log(n / middle)), n))


# ---------------------------------------------------------------------------- as rules


def conditions(
    predicates: Iterable[Predicate], within: str
) -> tuple[str, Mapping[str, Condition]] | None:
    """A conjunction as the ``op`` and ``when`` of a rule; None where it can never hold.

    Args:
        predicates: all must hold.
        within: the kind of op that they are about where they do not say.
    """
    op, when = within, {}
    by_feature: dict[str, list[Predicate]] = {}
    for predicate in predicates:
        by_feature.setdefault(predicate.feature, []).append(predicate)
    for name, tests in by_feature.items():
        if name == "op":
            kinds = {str(test.equal) for test in tests}
            if len(kinds) > 1 or not kinds <= OPS[within]:
                return None
            op = kinds.pop()
            continue
        source = _source(FEATURES[name], tests)
        if source is None:
            return None
        when[name] = parse_condition(FEATURES[name], source)
    return op, {name: when[name] for name in FEATURES if name in when}


def _source(feature: Feature, tests: Sequence[Predicate]) -> Value | None:
    """The tests of one feature in the grammar of rule tables; None if contradictory."""
    equal = next((test.equal for test in tests if test.equal is not None), None)
    if equal is not None:
        return equal if all(test.holds(equal) for test in tests) else None
    multiples = {test.multiple for test in tests if test.multiple is not None}
    low = max((test.low for test in tests if test.low is not None), default=None)
    high = min((test.high for test in tests if test.high is not None), default=None)
    if low is not None and high is not None and low > high:
        return None
    if low is not None and low == high:
        return low if all(low % m == 0 for m in multiples) else None
    words = [_bounds(low, high)] if low is not None or high is not None else []
    # All divisors are powers of two, so the largest says it all.
    words += [f"multiple of {max(multiples)}"] if multiples else []
    return " and ".join(words)


def _bounds(low: int | None, high: int | None) -> str:
    if low is None:
        assert high is not None
        return f"< {high + 1}"
    return f">= {low}" if high is None else f"{low}..{high}"
