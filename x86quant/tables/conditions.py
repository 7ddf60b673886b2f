"""The conditions of a rule, and patterns made of them.

One grammar for rules, errata and overrides:

==================  ==================================================================
in the table        meaning
==================  ==================================================================
``true``            the feature is true (or ``false``)
``3``               equal to 3
``"> 100"``         also ``>=``, ``<``, ``<=``, ``!=``
``"3..7"``          3 to 7, both ends included
``"multiple of 8"`` divisible by 8; ``"not multiple of 8"`` is the opposite
``"> 8 and ..."``   a bound or range, and multiples
``"intel"``         equal to this text
``[3, 5, "> 8"]``   any of these
==================  ==================================================================

A condition is a set of values, so that "this rule can never be reached" can be decided by set
inclusion.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from x86quant.spec import ROUTED_KINDS, OpSpec
from x86quant.tables.features import FEATURES, Feature, Value

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu

OPS: dict[str, frozenset[str]] = {
    "*": frozenset(ROUTED_KINDS),
    "conv": frozenset(kind for kind in ROUTED_KINDS if kind.startswith("conv")),
    **{kind: frozenset({kind}) for kind in ROUTED_KINDS},
}

Source: TypeAlias = "Value | tuple[Value, ...]"

_COMPARISON = re.compile(r"(>=|<=|!=|>|<) *(\d{1,18})")
_RANGE = re.compile(r"(\d{1,18}) *\.\. *(\d{1,18})")
_MULTIPLE = re.compile(r"(not )?multiple of +(\d{1,18})")
_INT_FORMS = '7, "> 100", ">= 3", "< 8", "<= 8", "!= 1", "3..7", "multiple of 8", "> 8 and ..."'


class ConditionError(ValueError):
    """A condition that makes no sense; the caller, which knows the file and line, adds them.

    Attributes:
        key: the name in ``when`` that is wrong, or None when it is the op.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


def did_you_mean(wrong: str, legal: Iterable[str]) -> str:
    """The nearest legal names, or all of them: the remedy half of an error."""
    names = sorted(legal)
    near = difflib.get_close_matches(wrong, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}choose from {', '.join(names)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The integers ``low..high`` that are multiples of ``step``, or, with ``apart``, are not.

    ``high`` None is no bound; step 1 without ``apart`` is every integer.
    """

    low: int
    high: int | None
    step: int = 1
    apart: bool = False

    def __contains__(self, value: int) -> bool:
        below = self.high is None or value <= self.high
        return self.low <= value and below and (value % self.step == 0) != self.apart

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        bounds = f"{self.low}.." if self.high is None else f"{self.low}..{self.high}"
        words = [] if self.high is None and self.low <= 1 else [bounds]
        if self.step > 1 or self.apart:
            words.append(f"{'no' if self.apart else 'a'} multiple of {self.step}")
        return " and ".join(words) or "any number"

    def inside(self, other: Span) -> bool:
        """Whether every value of this span is in ``other``."""
        if self.low == self.high:
            return self.low in other
        below = other.high is None or (self.high is not None and self.high <= other.high)
        return other.low <= self.low and below and self._divides_like(other)

    def _divides_like(self, other: Span) -> bool:
        if other.step == 1 and not other.apart:
            return True
        if self.apart != other.apart:
            return False
        # Multiples of 16 are multiples of 8; what is no multiple of 8 is none of 16.
        coarse, fine = (other, self) if self.apart else (self, other)
        return coarse.step % fine.step == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """A set of values of one feature: ``spans`` of integers, or single ``values``.

    ``source`` is what was written, kept to print and to write back.
    """

    source: Source
    values: frozenset[Value] = frozenset()
    spans: tuple[Span, ...] = ()

    def matches(self, value: Value | None) -> bool:
        """Whether a known ``value`` is in the set; an unknown one never is."""
        if value is None:
            return False
        if self.spans:
            return any(value in span for span in self.spans if isinstance(value, int))
        return value in self.values

    def implies(self, other: Condition) -> bool:
        """Whether every value in this set is in ``other`` (False when it cannot be told)."""
        if self.spans:
            return all(any(mine.inside(theirs) for theirs in other.spans) for mine in self.spans)
        return self.values <= other.values

    def edges(self) -> list[int]:
        """The integers at which the answer may differ from that of the integer before."""
        ends = [span.high + 1 for span in self.spans if span.high is not None]
        return sorted({*(span.low for span in self.spans), *ends})

    def __str__(self) -> str:
        sources = self.source if isinstance(self.source, tuple) else (self.source,)
        words = (str(item).lower() if isinstance(item, bool) else f"{item}" for item in sources)
        return " or ".join(words)


def _bounds(feature: Feature, text: str) -> list[Span] | None:
    """A comparison or a range as spans; None if ``text`` is neither."""
    first = feature.minimum
    if match := _RANGE.fullmatch(text):
        return [Span(int(match[1]), int(match[2]))]
    if match := _COMPARISON.fullmatch(text):
        bound = int(match[2])
        return {
            ">": [Span(bound + 1, None)],
            ">=": [Span(bound, None)],
            "<": [Span(first, bound - 1)],
            "<=": [Span(first, bound)],
            "!=": [Span(first, bound - 1), Span(bound + 1, None)],
        }[match[1]]
    return None


def _spans(feature: Feature, item: object) -> list[Span]:
    """The spans that one item of an integer condition stands for."""
    if isinstance(item, int) and not isinstance(item, bool):
        return [Span(item, item)]
    spans, divisors = [Span(feature.minimum, None)], 0
    for text in item.split(" and ") if isinstance(item, str) else [""]:
        bounds = _bounds(feature, text.strip())
        match = _MULTIPLE.fullmatch(text.strip())
        if bounds:
            spans = [joint for a in spans for b in bounds if (joint := _intersect(a, b))]
        elif match and int(match[2]) > 0 and not divisors:
            divisors, apart = int(match[2]), bool(match[1])
            spans = [dataclasses.replace(span, step=divisors, apart=apart) for span in spans]
        else:
            raise ConditionError(
                f"{item!r} is no condition on the number {feature.name}; write {_INT_FORMS}"
            )
    if divisors and feature.per_row:
        raise ConditionError(
            f"{feature.name} cannot be tested for multiples: it is not known when weights are "
            "packed; compare it with bounds instead"
        )
    return spans


def _intersect(a: Span, b: Span) -> Span | None:
    """The bounds of both; how multiples count is taken from ``a``."""
    highs = [high for high in (a.high, b.high) if high is not None]
    low, high = max(a.low, b.low), min(highs, default=None)
    return None if high is not None and high < low else dataclasses.replace(a, low=low, high=high)


def _merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join spans that touch, so that inclusion in a union is inclusion in one of them."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.step, s.apart, s.low)):
        last = merged[-1] if merged else None
        if (
            last
            and last.step == span.step == 1
            and (last.high is None or span.low <= last.high + 1)
        ):
            highs = [last.high, span.high]
            high = None if None in highs else max(h for h in highs if h is not None)
            merged[-1] = Span(last.low, high)
        else:
            merged.append(span)
    return tuple(merged)


def parse_condition(feature: Feature, source: object) -> Condition:
    """The condition that ``source``, a TOML value or a Python one, puts on ``feature``."""
    items = tuple(source) if isinstance(source, list | tuple) else (source,)
    if not items:
        raise ConditionError(f"an empty list for {feature.name} can never match; delete the rule")
    kept: Source = items if isinstance(source, list | tuple) else items[0]
    if feature.type == "int":
        spans = [span for item in items for span in _spans(feature, item)]
        everything = Span(feature.minimum, None)
        possible = [joint for span in spans if (joint := _intersect(span, everything))]
        if not possible:
            raise ConditionError(
                f"{source!r} can never match: {feature.name} is at least {feature.minimum}"
            )
        return Condition(kept, spans=_merge(possible))
    wanted = bool if feature.type == "bool" else str
    for item in items:
        if not isinstance(item, wanted):
            legal = "true or false" if wanted is bool else "a text"
            raise ConditionError(f"{item!r} is no condition on {feature.name}; write {legal}")
        if feature.values and item not in feature.values:
            remedy = did_you_mean(str(item), feature.values)
            raise ConditionError(f"{feature.name} is never {item!r}; {remedy}")
    return Condition(kept, values=frozenset(items))


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which ops are meant: a kind of op, and conditions that must all hold."""

    op: str
    when: Mapping[str, Condition]

    def matches(self, spec: OpSpec, cpu: Cpu) -> bool:
        """Whether ``spec`` on ``cpu`` is meant."""
        return spec.op in OPS[self.op] and all(
            condition.matches(FEATURES[name].get(spec, cpu))
            for name, condition in self.when.items()
        )

    def may_match(self, spec: OpSpec, cpu: Cpu) -> bool:
        """Whether ``spec`` may be meant once all that is not known before it runs is known."""
        return spec.op in OPS[self.op] and all(
            condition.matches(value)
            for name, condition in self.when.items()
            if (value := FEATURES[name].get(spec, cpu)) is not None or not FEATURES[name].run_time
        )

    def covers(self, other: Pattern) -> bool:
        """Whether everything that ``other`` matches is matched here too."""
        return OPS[other.op] <= OPS[self.op] and all(
            name in other.when and other.when[name].implies(condition)
            for name, condition in self.when.items()
        )

    def row_breaks(self, spec: OpSpec, cpu: Cpu) -> set[int]:
        """The rows from which the answer for ``spec`` may differ from fewer rows."""
        per_row = [(name, c) for name, c in self.when.items() if FEATURES[name].per_row]
        one_row = spec.replace(rows=1) if per_row and spec.rows != 1 else spec
        breaks = set()
        for name, condition in per_row:
            unit = FEATURES[name].get(one_row, cpu)
            if isinstance(unit, int) and unit > 0:
                breaks |= {math.ceil(edge / unit) for edge in condition.edges()}
        return breaks

    def describe(self) -> str:
        """For people: ``conv when groups > 100 and amx true``."""
        kind = "any op" if self.op == "*" else self.op
        tests = " and ".join(f"{name} {condition}" for name, condition in self.when.items())
        return f"{kind} when {tests}" if tests else kind


def parse_pattern(op: object, when: object) -> tuple[str, dict[str, Condition]]:
    """Check an ``op`` and a ``when`` as written; raises ConditionError saying what is wrong."""
    if not isinstance(op, str) or op not in OPS:
        raise ConditionError(f"unknown op {op!r}; {did_you_mean(str(op), OPS)}")
    if not isinstance(when, Mapping):
        raise ConditionError(f"when must be a table such as {{ groups = 1 }}, not {when!r}", "when")
    conditions = {}
    for name, source in when.items():
        if name not in FEATURES:
            raise ConditionError(f"unknown feature {name!r}; {did_you_mean(name, FEATURES)}", name)
        of = FEATURES[name].of
        owners = {"conv": OPS["conv"], "table": OPS["embedding_bag"]}.get(of, OPS[op])
        if not OPS[op] & owners:
            raise ConditionError(f"a {op} has no {name}: the rule can never match", name)
        try:
            conditions[name] = parse_condition(FEATURES[name], source)
        except ConditionError as error:
            raise ConditionError(str(error), name) from None
    return op, conditions
