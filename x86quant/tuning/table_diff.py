"""Which layers run on another kernel under another table, and what that gains."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from x86quant.hardware.cpu import Cpu
from x86quant.kernels import kernels_for
from x86quant.routing.router import choose
from x86quant.routing.routes import Choice
from x86quant.spec import OpSpec
from x86quant.tables.errata import Erratum, read_errata
from x86quant.tables.table import RuleTable
from x86quant.tuning.cases import Grid, Shape, jobs
from x86quant.tuning.measurements import Case, MeasurementSet, usual
from x86quant.tuning.samples import as_routed


@dataclasses.dataclass(frozen=True)
class LayerChange:
    """A layer for which two tables choose differently.

    Attributes:
        case: the layer and what it runs at.
        count: how often it occurs.
        old, new: the choices.
        old_us, new_us: measured microseconds; None where that was not measured.
    """

    case: Case
    count: int
    old: Choice
    new: Choice
    old_us: float | None = None
    new_us: float | None = None

    @property
    def gain(self) -> float | None:
        """How many times faster the new kernel is; None where unknown."""
        return self.old_us / self.new_us if self.old_us and self.new_us else None

    @property
    def saved_us(self) -> float:
        """Microseconds saved by all its occurrences; 0 where unknown."""
        return self.count * (self.old_us - self.new_us) if self.old_us and self.new_us else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "layer": str(self.case.spec),
            "caller": self.case.caller,
            "threads": self.case.spec.threads,
            "count": self.count,
            "old": {"kernel": self.old.kernel, "rule": self.old.rule, "us": self.old_us},
            "new": {"kernel": self.new.kernel, "rule": self.new.rule, "us": self.new_us},
            "gain": self.gain,
        }


@dataclasses.dataclass(frozen=True)
class TableDiff:
    """All changes, among how many layers."""

    changes: tuple[LayerChange, ...]
    layers: int

    @property
    def measured(self) -> tuple[LayerChange, ...]:
        """The changes whose gain is known."""
        return tuple(change for change in self.changes if change.gain is not None)

    @property
    def saved_us(self) -> float:
        """Microseconds saved by these, over all their occurrences."""
        return sum(change.saved_us for change in self.measured)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "layers": self.layers,
            "changed": len(self.changes),
            "measured": len(self.measured),
            "saved_us": round(self.saved_us, 3),
            "changes": [change.to_json() for change in self.changes],
        }


def diff_tables(
    old: RuleTable,
    new: RuleTable,
    shapes: Iterable[Shape],
    grid: Grid,
    cpu: Cpu,
    measured: Sequence[MeasurementSet] = (),
) -> TableDiff:
    """Compare what two tables choose for layers, and look the gains up.

    Legality is judged by the shape alone: what is known of weights before there are any.
    """
    times = _times(measured, cpu.isa)
    cases = [case for job in jobs(shapes, grid, machine="", isa=cpu.isa) for case in job]
    errata = read_errata(torch.__version__)
    changes = []
    for case in cases:
        before, after = (_choice(case, table, cpu, errata) for table in (old, new))
        if before.kernel != after.kernel:
            known = times.get((case.caller, _key(case.spec)), {})
            count = sum(number for _, number in case.nets)
            pair = known.get(before.kernel), known.get(after.kernel)
            changes.append(LayerChange(case, count, before, after, *pair))
    changes.sort(key=lambda c: (c.gain is None, -c.saved_us))
    return TableDiff(tuple(changes), len(cases))


def _choice(case: Case, table: RuleTable, cpu: Cpu, errata: Sequence[Erratum]) -> Choice:
    kernels = kernels_for(case.caller, case.spec)
    return choose(as_routed(case), cpu=cpu, table=table, kernels=kernels, errata=errata)


def _times(
    sets: Sequence[MeasurementSet], isa: str
) -> dict[tuple[str, OpSpec], Mapping[str, float]]:
    """Median times by caller and op, over machines and states of the caches."""
    found: dict[tuple[str, OpSpec], dict[str, list[float]]] = {}
    for m in (m for one in sets for m in usual(one) if m.case.isa == isa):
        if m.median_us is not None:
            of_op = found.setdefault((m.case.caller, _key(m.case.spec)), {})
            of_op.setdefault(m.kernel_name, []).append(m.median_us)
    return {
        key: {name: _geometric_mean(times) for name, times in of_op.items()}
        for key, of_op in found.items()
    }


def _geometric_mean(times: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(t) for t in times))


def _key(spec: OpSpec) -> OpSpec:
    """Without what does not change times: whether there is a bias, how weights are scaled."""
    return spec.replace(bias=True, per_channel=True, weights=None)
