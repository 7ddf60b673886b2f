"""Rule tables as values: which kernel is preferred, for which ops, on which CPUs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from x86quant.errors import RuleError
from x86quant.spec import OP_KINDS, OpSpec
from x86quant.tables.conditions import Pattern, did_you_mean
from x86quant.tables.features import FEATURES

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu

SCHEMA = 1
# How far a measured entry speaks for other shapes: the sum of |ln ratio| of the dimensions.
RADIUS = 0.5

Provenance: TypeAlias = "Mapping[str, str | int | float | bool]"


@dataclasses.dataclass(frozen=True)
class Rule(Pattern):
    """One rule: which ops it is for, which kernels it prefers, best first, and why."""

    use: tuple[str, ...]
    because: str = ""
    name: str = dataclasses.field(default="", compare=False)
    line: int = dataclasses.field(default=0, compare=False)

    def __str__(self) -> str:
        why = f"  ({self.because})" if self.because else ""
        return f"{self.name}: {self.describe()} → {', then '.join(self.use)}{why}"


# What may differ between two specs without their being different shapes.
_IGNORED = ("weights", "bias", "per_channel", "activation_max")
#: The fields of a spec that a table writes and reads.
SPEC_KEYS = {field.name for field in dataclasses.fields(OpSpec)} - set(_IGNORED)
#: What a convolution has on each side where nothing else is said.
USUAL_SIDES = {"stride": 1, "dilation": 1, "padding": 0, "output_padding": 0}
# What may differ in size between an entry and the shape that it is nearest to.
_SIZES = frozenset({"in_channels", "out_channels", "groups", "batch", "rows", "spatial"})


def shape_in_table(spec: OpSpec) -> OpSpec:
    """``spec`` as a table holds it: two specs of one shape are equal, and survive the file."""
    sides = {name: getattr(spec, name) or (n,) * spec.dims for name, n in USUAL_SIDES.items()}
    return spec.replace(weights=None, bias=True, per_channel=True, activation_max=255, **sides)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What is said of one shape: ``spec``, as ``shape_in_table`` gives it.

    A field of it that is None (rows, batch, spatial, threads, dynamic, post_op, caller) stands for
    every value.
    """

    spec: OpSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", shape_in_table(self.spec))

    def distance(self, spec: OpSpec) -> float:
        """0 for the very shape, else the sum of |ln ratio| of sizes; infinite if incomparable."""
        return _distance(self.spec, shape_in_table(spec))


@dataclasses.dataclass(frozen=True)
class Entry(_Shape):
    """One measured shape and the kernels that were best on it, best first."""

    use: tuple[str, ...]
    because: str = ""
    name: str = dataclasses.field(default="", compare=False)
    line: int = dataclasses.field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.spec} → {', then '.join(self.use)}"


@dataclasses.dataclass(frozen=True)
class Denial(_Shape):
    """A kernel that was found to be wrong on a shape, and must not run it."""

    kernel: str
    because: str = ""
    name: str = dataclasses.field(default="", compare=False)
    line: int = dataclasses.field(default=0, compare=False)

    def matches(self, spec: OpSpec) -> bool:
        """Whether ``spec`` is of this shape."""
        return self.distance(spec) == 0

    def __str__(self) -> str:
        why = f"  ({self.because})" if self.because else ""
        return f"{self.name}: {self.spec}: never {self.kernel}{why}"


def _distance(measured: OpSpec, spec: OpSpec) -> float:
    total = 0.0
    for name in SPEC_KEYS:
        mine, theirs = getattr(measured, name), getattr(spec, name)
        if mine is None or mine == theirs:
            continue
        if theirs is None or name not in _SIZES:
            return math.inf
        a, b = _volume(mine), _volume(theirs)
        total += abs(math.log(a / b)) if a and b else math.inf
    return math.inf if measured.depthwise != spec.depthwise else total


def _volume(size: int | tuple[int, ...]) -> int:
    return math.prod(size) if isinstance(size, tuple) else size


def _form(shape: OpSpec) -> tuple[object, ...]:
    """What two shapes must have in common to be near each other."""
    sides = (shape.kernel, shape.stride, shape.padding, shape.dilation, shape.output_padding)
    return (shape.op, shape.transposed, shape.depthwise, *sides)


_EVERYTHING = Pattern("*", {})


@dataclasses.dataclass(frozen=True)
class RuleTable:
    """Ordered preferences over kernels. Legality is not its business."""

    name: str
    rules: tuple[Rule, ...]
    schema: int = SCHEMA
    description: str = ""
    provenance: Provenance = dataclasses.field(default_factory=dict)
    hardware: Pattern = _EVERYTHING
    domain: Pattern = _EVERYTHING
    entries: tuple[Entry, ...] = ()
    denials: tuple[Denial, ...] = ()
    base: RuleTable | None = None
    path: str = dataclasses.field(default="", compare=False)

    def chain(self) -> Iterator[RuleTable]:
        """This table, the one it extends, and so on."""
        table: RuleTable | None = self
        while table is not None:
            yield table
            table = table.base

    def fits(self, cpu: Cpu) -> bool:
        """Whether ``cpu`` is of the class of hardware that the table is for."""
        return all(
            condition.matches(FEATURES[name].get(_ANY_OP, cpu))
            for name, condition in self.hardware.when.items()
        )

    def in_domain(self, spec: OpSpec, cpu: Cpu) -> bool:
        """Whether the rules were fitted to ops like this; an unknown feature does not exclude.

        Only products have a domain: a table of embeddings has rows, not channels.
        """
        if spec.op not in OP_KINDS:
            return True
        for name, condition in self.domain.when.items():
            value = FEATURES[name].get(spec, cpu)
            if value is not None and not condition.matches(value):
                return False
        return True

    def row_breaks(self, spec: OpSpec, cpu: Cpu) -> tuple[int, ...]:
        """The rows at which the answer for ``spec`` may change, ascending.

        Between two neighbouring breaks (the first one included) the same rules match, and the same
        entries are exact or nearest.
        """
        breaks: set[int] = set()
        one_row = spec.replace(rows=1)  # once: there are many patterns
        for table in self.chain():
            for pattern in (*table.rules, table.domain):
                breaks |= pattern.row_breaks(one_row, cpu)
            if table.fits(cpu):
                breaks |= table._row_breaks_of_shapes(spec)
        return tuple(sorted(b for b in breaks if b > 1))

    def has_sized_shapes(self, op: str) -> bool:
        """Whether an entry or denial for such ops speaks of one batch or one spatial size."""
        return any(
            shape.spec.op == op and (shape.spec.batch, shape.spec.spatial) != (None, None)
            for table in self.chain()
            for shape in (*table.entries, *table.denials)
        )

    def entries_near(self, spec: OpSpec) -> list[tuple[float, Entry]]:
        """The entries no further than ``RADIUS`` from ``spec``, nearest first."""
        shape = shape_in_table(spec)
        alike = self._entries_by_form.get(_form(shape), ())
        found = ((_distance(entry.spec, shape), entry) for entry in alike)
        return sorted((pair for pair in found if pair[0] <= RADIUS), key=lambda pair: pair[0])

    @functools.cached_property
    def _entries_by_form(self) -> dict[tuple[object, ...], list[Entry]]:
        """The entries that any one op can be near to, so that not all need be looked at."""
        forms: dict[tuple[object, ...], list[Entry]] = {}
        for entry in self.entries:
            forms.setdefault(_form(entry.spec), []).append(entry)
        return forms

    def _row_breaks_of_shapes(self, spec: OpSpec) -> set[int]:
        """The rows at which an entry or denial begins or ends to speak for ``spec``."""
        shape = shape_in_table(spec)
        breaks: set[int] = set()
        reach: list[tuple[int, float]] = []  # the rows of each entry near enough, its distance
        for entry in self._entries_by_form.get(_form(shape), ()):
            if (rows := entry.spec.rows) is not None:
                away = _distance(entry.spec, shape.replace(rows=rows))
                if away <= RADIUS:
                    reach.append((rows, away))
        for denial in self.denials:
            if (rows := denial.spec.rows) is not None and denial.matches(spec.replace(rows=rows)):
                breaks |= {rows, rows + 1}
        for rows, away in reach:
            left = RADIUS - away
            ends = [rows * math.exp(-left), rows, rows * math.exp(left)]
            # Where another entry becomes the nearer one.
            ends += [math.sqrt(rows * n) * math.exp((other - away) / 2) for n, other in reach]
            breaks |= {row for end in ends for row in (math.ceil(end), math.floor(end) + 1)}
        return breaks

    def kernels(self) -> dict[str, Rule | Entry | Denial]:
        """Every kernel named here, with the first rule, entry or denial that names it."""
        named: dict[str, Rule | Entry | Denial] = {}
        items: list[Rule | Entry] = [*self.entries, *self.rules]
        for item in items:
            for kernel in item.use:
                named.setdefault(kernel, item)
        for denial in self.denials:
            named.setdefault(denial.kernel, denial)
        return named

    def denied(self, spec: OpSpec, cpu: Cpu) -> dict[str, str]:
        """The kernels found to be wrong on ``spec``, and why, here or in a table extended."""
        return {
            denial.kernel: f"denied by {denial.name}: {denial.because or 'measured to be wrong'}"
            for table in self.chain()
            if table.denials and table.fits(cpu)
            for denial in table.denials
            if denial.matches(spec)
        }

    def check_kernels(self, known: Collection[str]) -> None:
        """Raise RuleError for a kernel that is not ``known``, here or in a table extended."""
        for table in self.chain():
            for kernel, item in table.kernels().items():
                if kernel not in known:
                    raise RuleError(
                        f"{table.path}:{item.line}: {item.name} names the unknown kernel "
                        f"{kernel!r}; {did_you_mean(kernel, known)}"
                    )

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.description}" if self.description else self.name]
        lines += [f"  {key}: {value}" for key, value in self.provenance.items()]
        for label, pattern in (("for", self.hardware), ("fitted to", self.domain)):
            if pattern.when:
                lines.append(f"  {label} {pattern.describe().removeprefix('any op when ')}")
        lines += [f"  {item}" for item in (*self.denials, *self.entries, *self.rules)]
        if self.base is not None:
            lines.append(f"  else as {self.base.name}")
        return "\n".join(lines)


# Hardware conditions read the CPU only; this op is never looked at.
_ANY_OP = OpSpec("linear", 1, 1)
