"""Measurements as data: cases, and what each candidate took on them.

A *case* is everything but the kernel and its results; every candidate of a case is kept, losers,
failures and refusals too. Times of one case were taken in turn and compare; times of different
cases do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from x86quant.spec import OpSpec

#: ``stock``: quantized tensors through the stock operators with routed packs.
#: ``graph``: the compiled runtime.
Caller = Literal["stock", "graph"]
#: ``hot``: the same operands every call. ``rotated``: cycled over copies larger than the caches.
Cache = Literal["hot", "rotated"]
#: ``ok`` was timed; ``wrong`` differs from the reference and must not be used; ``failed`` raised
#: or ended its process; ``unsupported`` says itself that it cannot; ``skipped`` was not tried.
Status = Literal["ok", "wrong", "failed", "unsupported", "skipped"]

#: How a note begins where a kernel was timed with weights that cannot saturate 16-bit sums:
#: because it is refused for others, or to compare it with one that is.
NARROW_WEIGHTS = "narrow weights only"

#: Candidates within this share of the best are as good as the best.
TIE = 0.03


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What was measured, whichever kernel ran it.

    Attributes:
        machine: the class of CPU, as ``machine_name`` says it: ``GenuineIntel-6-143``.
        isa: the level the process was held to.
        caller: who calls the kernel.
        spec: the op; ``threads``, ``rows`` and ``dynamic`` are known, ``batch`` and ``spatial``
            too for a convolution. ``post_op`` None stands for none.
        cache: whether operands were in the caches.
        nets: the networks it occurs in, each with how often. Not part of what a case *is*: two
            cases that differ in nothing else are equal.
    """

    machine: str
    isa: str
    caller: Caller
    spec: OpSpec
    cache: Cache = "hot"
    nets: tuple[tuple[str, int], ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        parts = [str(self.spec)]
        if self.spec.spatial:
            parts.append(f"@{'×'.join(map(str, self.spec.spatial))} n{self.spec.batch}")
        if self.spec.post_op:
            parts.append(self.spec.post_op)
        return " ".join([*parts, f"t{self.spec.threads}", self.cache])


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate on one case. Times are in microseconds, None unless ``status`` is "ok".

    Attributes:
        case: what was measured.
        kernel_name: the candidate.
        status: whether it was timed, and if not, why in a word.
        median_us: median over the rounds.
        low_us, high_us: 95% confidence interval of the median.
        min_us: the fastest round.
        rounds: how often it was timed.
        tie: as good as the best: within noise, or within 3%. The best itself is a tie when
            another one is.
        note: why in words.
    """

    case: Case
    kernel_name: str
    status: Status
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    min_us: float | None = None
    rounds: int = 0
    tie: bool = False
    note: str = ""

    def spec(self) -> OpSpec:
        """The op that was measured."""
        return self.case.spec

    @property
    def narrow_weights(self) -> bool:
        """Whether it was timed with weights that cannot saturate 16-bit sums."""
        return self.note.startswith(NARROW_WEIGHTS)


@dataclasses.dataclass(frozen=True)
class MeasurementSet:
    """Measurements, and what they were made with."""

    measurements: tuple[Measurement, ...]
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict)
    path: str = dataclasses.field(default="", compare=False)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.measurements)

    def __len__(self) -> int:
        return len(self.measurements)

    def cases(self) -> dict[Case, tuple[Measurement, ...]]:
        """The candidates of every case, in the order of the file."""
        found: dict[Case, list[Measurement]] = {}
        for measurement in self.measurements:
            found.setdefault(measurement.case, []).append(measurement)
        return {case: tuple(candidates) for case, candidates in found.items()}

    def where(self, keep: Callable[[Case], bool]) -> MeasurementSet:
        """Only the cases that ``keep`` says yes to."""
        kept = tuple(m for m in self.measurements if keep(m.case))
        return dataclasses.replace(self, measurements=kept)

    def networks(self) -> tuple[str, ...]:
        """Every network named, sorted."""
        return tuple(sorted({net for m in self.measurements for net, _ in m.case.nets}))


def machine_name(vendor: str, family: int | str, model: int | str) -> str:
    """The class of CPU that measurements of one machine speak for."""
    return f"{vendor}-{family}-{model}"


def usual(measured: Iterable[Measurement]) -> Iterator[Measurement]:
    """Without those of narrow weights where the kernel ran others too."""
    found = tuple(measured)
    others = {(m.case, m.kernel_name) for m in found if m.status == "ok" and not m.narrow_weights}
    return (m for m in found if not m.narrow_weights or (m.case, m.kernel_name) not in others)


def merge(sets: Iterable[MeasurementSet]) -> MeasurementSet:
    """All measurements of several runs or machines; sorted, so that their order is no matter.

    A case measured again replaces the older one, with all its candidates, since only times taken
    together compare: the run with the later ``date`` counts. Networks are united.
    """
    cases: dict[Case, tuple[Measurement, ...]] = {}
    nets: dict[Case, dict[str, int]] = {}
    ordered = sorted(sets, key=lambda s: (s.provenance.get("date", ""), s.path))
    for one in ordered:
        for case, candidates in one.cases().items():
            cases[case] = candidates
            nets.setdefault(case, {}).update(case.nets)
    merged = [
        dataclasses.replace(
            m, case=dataclasses.replace(case, nets=tuple(sorted(nets[case].items())))
        )
        for case, candidates in cases.items()
        for m in candidates
    ]
    return MeasurementSet(tuple(sorted(merged, key=order_of)), _merged_provenance(ordered))


def _merged_provenance(sets: list[MeasurementSet]) -> dict[str, str]:
    """Each key with its different values."""
    values: dict[str, dict[str, None]] = {}
    for one in sets:
        for key, value in one.provenance.items():
            for part in value.split(" | "):
                values.setdefault(key, {})[part] = None
    return {key: " | ".join(sorted(found)) for key, found in values.items()}


def order_of(measurement: Measurement) -> tuple[Any, ...]:
    """Where a measurement stands in a file: cases by what they are, candidates by name."""
    case, spec = measurement.case, measurement.case.spec
    fields = (getattr(spec, field.name) for field in dataclasses.fields(spec))
    # None before anything else; values of one field have one type.
    shape = tuple((value is not None, value) for value in fields)
    candidate = (measurement.kernel_name, measurement.narrow_weights)
    return (case.machine, case.isa, case.caller, shape, case.cache, *candidate)
