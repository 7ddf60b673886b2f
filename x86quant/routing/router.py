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

Weights of stock operators are packed before all is known that a choice depends on. ``route`` asks
for every number of rows, and for every situation in which a kernel chosen cannot run.

Nothing here knows an op, a kernel or a CPU by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from x86quant.errors import InvalidInputError, NoKernelError, UnsupportedError
from x86quant.kernels import kernel_names
from x86quant.kernels.base import Situation
from x86quant.routing.routes import Choice, Detour, Routes
from x86quant.routing.sizes import SizeRanges
from x86quant.spec import OpSpec
from x86quant.tables.conditions import ConditionError, Pattern, did_you_mean, parse_pattern
from x86quant.tables.errata import Erratum
from x86quant.tables.features import FEATURES
from x86quant.tables.table import RADIUS, RuleTable

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.kernels import Kernel

#: Kernel -> reasons.
Refusals = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Override(Pattern):
    """The user's word: ops that match run on ``kernel``."""

    kernel: str

    def binds(self, spec: OpSpec, kernels: Mapping[str, Kernel]) -> bool:
        """Whether it is an error where ``kernel`` cannot run ``spec``, which it matches.

        It is for stock operators. In compiled models, whose kernels are others of the same names,
        it is a wish, unless it says ``caller="graph"`` or tests ``dynamic``: it means those then.
        """
        if self.kernel not in kernels and self.kernel in kernel_names():
            return False
        return spec.caller != "graph" or not self.when.keys().isdisjoint({"caller", "dynamic"})

    def __str__(self) -> str:
        return f"override: {self.describe()} → {self.kernel}"


def make_override(kernel: str, op: str = "*", **features: object) -> Override:
    """An override; conditions are written as in a table: ``groups="> 100"``, ``amx=True``."""
    try:
        return Override(*parse_pattern(op, features), kernel)
    except ConditionError as error:
        raise InvalidInputError(f"override({kernel!r}): {error}") from None


@dataclasses.dataclass(frozen=True)
class Routing:
    """Everything that a choice depends on but the op itself.

    Attributes:
        cpu: what the ops run on.
        table: the rules in force.
        kernels: the kernels to choose among, by name.
        overrides: the user's, first one that matches wins.
        errata: kernels to deny.
    """

    cpu: Cpu
    table: RuleTable
    kernels: Mapping[str, Kernel]
    overrides: tuple[Override, ...] = ()
    errata: tuple[Erratum, ...] = ()

    def choose(self, spec: OpSpec, ruled_out: Refusals | None = None) -> Choice:
        """The kernel for ``spec``, and none of those ``ruled_out``, for reasons of the caller.

        Raises:
            NoKernelError: no kernel can run the op.
            UnsupportedError: not the one that an override names can.
            InvalidInputError: an override names no kernel.
        """
        refused = self._refused(spec, ruled_out or {})
        legal = [name for name in self.kernels if name not in refused]
        steps = [f"{name} refused: {'; '.join(reasons)}" for name, reasons in refused.items()]
        if not legal:
            raise NoKernelError(f"no kernel can run {spec}:{_listed(refused)}")
        steps.append(f"legal: {', '.join(legal)}")
        for rule, reason, names, must in self._preferences(spec, legal):
            usable = [name for name in names if name in legal]
            steps.append(f"{rule}: prefers {', '.join(names)}" if names else f"{rule}: {reason}")
            if usable:
                return Choice(spec, usable[0], rule, reason, tuple(steps), tuple(refused.items()))
            if must:
                self._refuse_override(spec, names[0], refused)
        raise AssertionError("the fallback names every legal kernel")

    def refusals(self, spec: OpSpec) -> dict[str, tuple[str, ...]]:
        """Steps 1 and 2: the kernels that cannot, or must not, run ``spec``, with all reasons."""
        all_reasons = {name: self._reasons(name, spec) for name in self.kernels}
        return {name: reasons for name, reasons in all_reasons.items() if reasons}

    def _reasons(self, name: str, spec: OpSpec) -> tuple[str, ...]:
        kernel = self.kernels[name]
        return (
            *(f"the CPU lacks {feature}" for feature in kernel.missing_features(self.cpu)),
            *kernel.not_supported_reasons(spec, self.cpu),
            *(
                _erratum_reason(erratum)
                for erratum in self.errata
                if erratum.kernel == name and erratum.matches(spec, self.cpu)
            ),
        )

    def size_ranges(self, spec: OpSpec) -> SizeRanges:
        """How the answer for ``spec`` changes with the sizes of its input."""
        unsized = spec.replace(batch=None, rows=None, spatial=None)
        patterns: list[Pattern] = [*self.overrides, *self.errata]
        for table in self.table.chain():
            patterns += [*table.rules, table.domain]
        names = {n for p in patterns if p.may_match(unsized, self.cpu) for n in p.when}
        features = [FEATURES[n] for n in sorted(names) if FEATURES[n].run_time]
        return SizeRanges(
            self._row_breaks(unsized),
            tuple(f for f in features if not f.per_row and f.get(unsized, self.cpu) is None),
            # The products of a transposed convolution do not follow from its rows.
            exact=spec.transposed or self.table.has_sized_shapes(spec.op),
        )

    def route(self, spec: OpSpec) -> Routes:
        """How weights run that are packed before rows and the like are known."""
        # How many rows a transposed convolution multiplies follows from no output size.
        ranges = ((None, self.choose(spec)),) if spec.transposed else self._by_rows(spec)
        detours: list[Detour] = []
        for number, (_, choice) in enumerate(ranges):
            self._add_detours(detours, len(ranges), number, choice, ())
        return Routes(ranges, tuple(detours))

    def _refused(self, spec: OpSpec, ruled_out: Refusals) -> dict[str, tuple[str, ...]]:
        refused = self.refusals(spec)
        more = [(name, (why,)) for name, why in self.table.denied(spec, self.cpu).items()]
        for name, reasons in (*more, *ruled_out.items()):
            if name in self.kernels:
                refused[name] = (*refused.get(name, ()), *reasons)
        return refused

    def _preferences(
        self, spec: OpSpec, legal: list[str]
    ) -> Iterator[tuple[str, str, Sequence[str], bool]]:
        """Steps 3 to 7, in order: who speaks, why, the kernels preferred, whether it is a must.

        No kernels means that a table was passed over, for that reason.
        """
        cpu = self.cpu
        for override in self.overrides:
            if override.matches(spec, cpu):
                must = override.binds(spec, self.kernels)
                yield "override", override.describe(), [override.kernel], must
        for link in self.table.chain():
            fits, inside = link.fits(cpu), link.in_domain(spec, cpu)
            if not fits:
                yield link.name, "its entries are for other hardware", (), False
            entries = link.entries_near(spec) if fits else []
            for distance, entry in entries:
                if distance == 0:
                    yield entry.name, entry.because or "measured", entry.use, False
            for rule in link.rules if inside else ():
                if rule.matches(spec, cpu):
                    yield rule.name, rule.because, rule.use, False
            if not inside:
                yield link.name, "the op is outside what its rules were fitted to", (), False
            for distance, entry in entries if not inside else ():
                if 0 < distance <= RADIUS:
                    near = f"nearest measured: {entry.spec}, {distance:.2f} away"
                    yield entry.name.replace(":entry#", ":near#"), near, entry.use, False
        yield "fallback", "no rule names a kernel that can run this", legal, False

    def _refuse_override(self, spec: OpSpec, name: str, refused: Refusals) -> None:
        if name not in self.kernels:
            raise InvalidInputError(
                f"override: unknown kernel {name!r}; {did_you_mean(name, self.kernels)}"
            )
        raise UnsupportedError(
            f"override: {name} cannot run {spec}:{_listed({name: refused[name]})}\n"
            "Undo the override, or narrow it so that it leaves this op out."
        )

    def _by_rows(self, spec: OpSpec) -> tuple[tuple[int | None, Choice], ...]:
        pieces: list[tuple[int | None, Choice]] = []
        starts = [1, *self._row_breaks(spec)]
        for start, after in zip(starts, [*starts[1:], None], strict=True):
            choice = self.choose(spec.replace(rows=start))
            if pieces and pieces[-1][1].kernel == choice.kernel:
                choice = pieces.pop()[1]
            pieces.append((None if after is None else after - 1, choice))
        return tuple(pieces)

    def _row_breaks(self, spec: OpSpec) -> tuple[int, ...]:
        patterns: list[Pattern] = [*self.overrides, *self.errata]
        breaks = set(self.table.row_breaks(spec, self.cpu))
        breaks |= {b for pattern in patterns for b in pattern.row_breaks(spec, self.cpu) if b > 1}
        breaks |= {b for kernel in self.kernels.values() for b in kernel.row_breaks}
        return tuple(sorted(breaks))

    def _add_detours(
        self,
        detours: list[Detour],
        ranges: int,
        origin: int,
        choice: Choice,
        held: tuple[Situation, ...],
    ) -> None:
        """What runs instead of ``choice`` where it cannot, when the situations ``held`` do."""
        spec = choice.spec.replace(rows=None)
        for situation, reason in self._situations(choice.kernel, spec).items():
            if situation in held:
                continue
            now = (*held, situation)
            ruled_out = {
                name: tuple(
                    f"{why} (where {one})"
                    for one, why in self._situations(name, spec).items()
                    if one in now
                )
                for name in self.kernels
            }
            # An override means the layer as a whole; here it may name the kernel that is wrong.
            instead = dataclasses.replace(self, overrides=()).choose(
                situation.applied_to(spec), {name: why for name, why in ruled_out.items() if why}
            )
            detours.append(Detour(origin, situation, reason, instead))
            self._add_detours(detours, ranges, ranges + len(detours) - 1, instead, now)

    def _situations(self, name: str, spec: OpSpec) -> dict[Situation, str]:
        """In which situations ``name`` cannot run ``spec``: what it says itself, and errata."""
        found = dict(self.kernels[name].situations(spec, self.cpu))
        for erratum in self.errata:
            if erratum.kernel == name:
                for widths in erratum.widths(spec, self.cpu):
                    found[Situation("width", widths)] = _erratum_reason(erratum)
        usual = self._reasons(name, spec)
        for situation in _open_questions(spec):
            then = self._reasons(name, situation.applied_to(spec))
            if new := [reason for reason in then if reason not in usual]:
                found[situation] = "; ".join(new)
        return found


def _open_questions(spec: OpSpec) -> Iterator[Situation]:
    """Situations of which ``spec`` says nothing, so that a call may be in them."""
    if spec.activation_max < 255:
        yield Situation("zero_point")
    if spec.dynamic is None:
        yield Situation("dynamic")


def _erratum_reason(erratum: Erratum) -> str:
    return f"erratum: {erratum.because} ({erratum.reference})"


def _listed(refused: Mapping[str, Sequence[str]]) -> str:
    return "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in refused.items())


def choose(
    spec: OpSpec,
    *,
    cpu: Cpu,
    table: RuleTable,
    kernels: Mapping[str, Kernel],
    overrides: Sequence[Override] = (),
    errata: Sequence[Erratum] = (),
) -> Choice:
    """The kernel for ``spec``; arguments and errors are those of ``Routing``."""
    return Routing(cpu, table, kernels, tuple(overrides), tuple(errata)).choose(spec)
