"""``Choice``: which kernel runs an op, and how that came about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from x86quant.spec import OpSpec, WeightFacts


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
