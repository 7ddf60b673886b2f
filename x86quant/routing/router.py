"""The one place where a kernel is chosen: ``OpSpec -> Choice``.

Looked up in this order, each step recorded:

1. legality: every kernel says why it cannot run the op;
2. errata: kernels known to be wrong or to crash on it are denied, with a reference; so are those
   that the table says were wrong when measured;
3. the user's override;
4. a measured entry for exactly this shape, on this class of hardware;
5. the first rule that matches, if the op is like those the rules were fitted to;
6. outside that domain, the nearest measured entry within a radius, else the table extended;
7. any legal kernel, in the order in which they are registered.

Nothing here knows an op, a kernel or a CPU by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from x86quant.errors import InvalidInputError, NoKernelError, UnsupportedError
from x86quant.spec import OpSpec, WeightFacts
from x86quant.tables.conditions import ConditionError, Pattern, did_you_mean, parse_pattern
from x86quant.tables.errata import Erratum
from x86quant.tables.table import RADIUS, RuleTable

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.kernels.base import Kernel


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


@dataclasses.dataclass(frozen=True)
class Override(Pattern):
    """The user's word: ops that match run on ``kernel``."""

    kernel: str

    def __str__(self) -> str:
        return f"override: {self.describe()} → {self.kernel}"


def make_override(kernel: str, op: str = "*", **features: object) -> Override:
    """An override; conditions are written as in a table: ``groups="> 100"``, ``amx=True``."""
    try:
        return Override(*parse_pattern(op, features), kernel)
    except ConditionError as error:
        raise InvalidInputError(f"override({kernel!r}): {error}") from None


def choose(
    spec: OpSpec,
    *,
    cpu: Cpu,
    table: RuleTable,
    kernels: Mapping[str, Kernel],
    overrides: Sequence[Override] = (),
    errata: Sequence[Erratum] = (),
) -> Choice:
    """The kernel for ``spec`` on ``cpu``.

    Args:
        spec: the op.
        cpu: what it runs on.
        table: the rules in force.
        kernels: every registered kernel, by name.
        overrides: the user's, first one that matches wins.
        errata: kernels to deny.

    Raises:
        UnsupportedError: no kernel can run the op, or not the one that an override names.
        InvalidInputError: an override names no kernel.
    """
    refused = refusals(spec, cpu, kernels, errata)
    for name, reason in table.denied(spec, cpu).items():
        if name in kernels:
            refused[name] = (*refused.get(name, ()), reason)
    legal = [name for name in kernels if name not in refused]
    steps = [f"{name} refused: {'; '.join(reasons)}" for name, reasons in refused.items()]
    if not legal:
        raise NoKernelError(f"no kernel can run {spec}:{_listed(refused)}")
    steps.append(f"legal: {', '.join(legal)}")
    for rule, reason, names, must in _preferences(spec, cpu, table, legal, overrides):
        usable = [name for name in names if name in legal]
        steps.append(f"{rule}: prefers {', '.join(names)}" if names else f"{rule}: {reason}")
        if usable:
            return Choice(spec, usable[0], rule, reason, tuple(steps), tuple(refused.items()))
        if must:
            _refuse_override(spec, names[0], kernels, refused)
    raise AssertionError("the fallback names every legal kernel")


def refusals(
    spec: OpSpec, cpu: Cpu, kernels: Mapping[str, Kernel], errata: Sequence[Erratum]
) -> dict[str, tuple[str, ...]]:
    """Steps 1 and 2: the kernels that cannot, or must not, run ``spec``, with all reasons."""
    refused = {}
    for name, kernel in kernels.items():
        reasons = [f"the CPU lacks {feature}" for feature in kernel.missing_features(cpu)]
        reasons += kernel.not_supported_reasons(spec, cpu)
        reasons += [
            f"erratum: {erratum.because} ({erratum.reference})"
            for erratum in errata
            if erratum.kernel == name and erratum.matches(spec, cpu)
        ]
        if reasons:
            refused[name] = tuple(reasons)
    return refused


def _preferences(
    spec: OpSpec, cpu: Cpu, table: RuleTable, legal: list[str], overrides: Sequence[Override]
) -> Iterator[tuple[str, str, Sequence[str], bool]]:
    """Steps 3 to 7, in order: who speaks, why, the kernels preferred, whether it is a must.

    No kernels means that a table was passed over, for that reason.
    """
    for override in overrides:
        if override.matches(spec, cpu):
            yield "override", override.describe(), [override.kernel], True
    for link in table.chain():
        fits, inside = link.fits(cpu), link.in_domain(spec, cpu)
        if not fits:
            yield link.name, "its entries are for other hardware", (), False
        entries = sorted(
            ((entry.distance(spec), number, entry) for number, entry in enumerate(link.entries)),
            key=lambda found: found[:2],
        )
        for distance, _, entry in entries if fits else ():
            if distance == 0:
                yield entry.name, entry.because or "measured", entry.use, False
        for rule in link.rules if inside else ():
            if rule.matches(spec, cpu):
                yield rule.name, rule.because, rule.use, False
        if not inside:
            yield link.name, "the op is outside what its rules were fitted to", (), False
        for distance, _, entry in entries if fits and not inside else ():
            if 0 < distance <= RADIUS:
                near = f"nearest measured: {entry.spec}, {distance:.2f} away"
                yield entry.name.replace(":entry#", ":near#"), near, entry.use, False
    yield "fallback", "no rule names a kernel that can run this", legal, False


def _refuse_override(
    spec: OpSpec, name: str, kernels: Mapping[str, Kernel], refused: Mapping[str, tuple[str, ...]]
) -> None:
    if name not in kernels:
        raise InvalidInputError(f"override: unknown kernel {name!r}; {did_you_mean(name, kernels)}")
    raise UnsupportedError(
        f"override: {name} cannot run {spec}:{_listed({name: refused[name]})}\n"
        "Undo the override, or narrow it so that it leaves this op out."
    )


def _listed(refused: Mapping[str, Sequence[str]]) -> str:
    return "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in refused.items())


def choose_by_rows(
    spec: OpSpec,
    *,
    cpu: Cpu,
    table: RuleTable,
    kernels: Mapping[str, Kernel],
    overrides: Sequence[Override] = (),
    errata: Sequence[Erratum] = (),
) -> tuple[tuple[int | None, Choice], ...]:
    """The choice for every number of rows, for weights packed before the rows are known.

    Each pair is the largest number of rows (None: no bound) and the choice up to there,
    ascending; neighbours differ in their kernel. An empty batch goes with one row.
    """
    patterns: list[Pattern] = [*overrides, *errata]
    breaks = set(table.row_breaks(spec, cpu))
    breaks |= {b for pattern in patterns for b in pattern.row_breaks(spec, cpu) if b > 1}
    pieces: list[tuple[int | None, Choice]] = []
    starts = [1, *sorted(breaks)]
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        choice = choose(
            spec.replace(rows=start),
            cpu=cpu,
            table=table,
            kernels=kernels,
            overrides=overrides,
            errata=errata,
        )
        if pieces and pieces[-1][1].kernel == choice.kernel:
            choice = pieces.pop()[1]
        pieces.append((None if after is None else after - 1, choice))
    return tuple(pieces)
