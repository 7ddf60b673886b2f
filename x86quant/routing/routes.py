"""``Choice``: which kernel runs an op, and why; ``Routes``: what a pack is told.

That is its kernel for every number of rows, and what runs where that one cannot.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from x86quant.kernels.base import Situation
from x86quant.spec import OpSpec, WeightFacts
from x86quant.tables.conditions import Span


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which kernel runs an op, and why.

    Attributes:
        spec: the op.
        kernel: the name of the kernel.
        rule: what chose it: "default#4", "mine:entry#1", "mine:near#1", "override", "fallback".
        reason: why, in the words of that rule.
        steps: the look-up, one line a step.
        passed_over: every kernel that could not be used, with its reasons.
    """

    spec: OpSpec
    kernel: str
    rule: str
    reason: str
    steps: tuple[str, ...] = ()
    passed_over: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values that ``json`` can write."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        """The choice that ``to_json`` gave, also after a round trip through ``json``."""
        fields = {key: _tuples(value) for key, value in data.items() if key != "spec"}
        spec = {key: _tuples(value) for key, value in data["spec"].items() if key != "weights"}
        weights = data["spec"].get("weights")
        if weights is not None:
            spec["weights"] = WeightFacts(**{key: _tuples(v) for key, v in weights.items()})
        return cls(spec=OpSpec(**spec), **fields)

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.spec} → {self.kernel} by {self.rule}{why}"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


#: How an unbounded range is told to C++.
NO_LIMIT = -1


@dataclasses.dataclass(frozen=True)
class Detour:
    """Another kernel's turn, in a situation in which the usual one must not run.

    Attributes:
        origin: what it leaves: a range of the ``Routes``, by its number, or a detour, by its
            number plus that of the ranges.
        situation: when.
        reason: why the kernel it leaves cannot run then.
        choice: what runs instead.
    """

    origin: int
    situation: Situation
    reason: str
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Routes:
    """How packed weights run.

    Attributes:
        ranges: the largest number of rows (None: no bound) and the choice up to there, ascending;
            neighbours differ in their kernel. An empty batch goes with one row.
        detours: in the order in which a pack looks at them.
    """

    ranges: tuple[tuple[int | None, Choice], ...]
    detours: tuple[Detour, ...] = ()

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Those of the ranges, then those of the detours."""
        return (*(c for _, c in self.ranges), *(detour.choice for detour in self.detours))

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of the ranges."""
        return tuple(choice.kernel for _, choice in self.ranges)

    def choice_for(self, rows: int) -> Choice:
        """What runs so many rows, where no detour is taken."""
        return next(choice for limit, choice in self.ranges if limit is None or rows <= limit)

    @property
    def row_limits(self) -> list[int]:
        """The upper bounds of the ranges as C++ takes them."""
        return [NO_LIMIT if rows is None else rows for rows, _ in self.ranges]

    @property
    def situations(self) -> list[str]:
        """The kinds of the detours' situations as C++ takes them."""
        return [detour.situation.kind for detour in self.detours]

    @property
    def detour_numbers(self) -> list[int]:
        """Of each detour, as C++ takes it: origin, and the widths' low, high, step and apart."""
        return [number for detour in self.detours for number in _numbers(detour)]

    def detours_of(self, number: int) -> tuple[tuple[tuple[Situation, ...], Detour], ...]:
        """The detours that a run may take from the range of this number.

        Each with all situations that have to hold for it.
        """
        found: list[tuple[tuple[Situation, ...], Detour]] = []
        reached: dict[int, tuple[Situation, ...]] = {number: ()}
        for index, detour in enumerate(self.detours, len(self.ranges)):
            if detour.origin in reached:
                reached[index] = (*reached[detour.origin], detour.situation)
                found.append((reached[index], detour))
        return tuple(found)

    def to_json(self) -> str:
        """What a pack keeps."""
        ranges = [[rows, choice.to_json()] for rows, choice in self.ranges]
        detours = [
            {**dataclasses.asdict(detour), "choice": detour.choice.to_json()}
            for detour in self.detours
        ]
        return json.dumps({"ranges": ranges, "detours": detours})

    @classmethod
    def from_json(cls, text: str) -> Routes:
        """What ``to_json`` gave."""
        data = json.loads(text)
        return cls(
            tuple((rows, Choice.from_json(choice)) for rows, choice in data["ranges"]),
            tuple(_detour_from_json(detour) for detour in data["detours"]),
        )


def _numbers(detour: Detour) -> list[int]:
    widths = detour.situation.widths
    high = NO_LIMIT if widths.high is None else widths.high
    return [detour.origin, widths.low, high, widths.step, int(widths.apart)]


def _detour_from_json(data: dict[str, Any]) -> Detour:
    situation = Situation(data["situation"]["kind"], Span(**data["situation"]["widths"]))
    return Detour(data["origin"], situation, data["reason"], Choice.from_json(data["choice"]))
