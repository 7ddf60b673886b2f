"""Measurements as a table of rules sees them: which kernels may run an op, and what each costs.

A sample is one measured case. Where a kernel runs a layer only if its weights cannot saturate
16-bit sums, the case gives two samples of half the weight: a layer with such weights, where that
kernel may be chosen, and one without.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from x86quant.errors import MeasurementError
from x86quant.hardware.cpu import Cpu
from x86quant.hardware.isa import LEVELS
from x86quant.kernels import FORMER_KERNELS, kernels_for
from x86quant.routing.router import choose
from x86quant.routing.routes import Choice
from x86quant.spec import OpSpec
from x86quant.tables.table import RuleTable
from x86quant.tuning.measurements import TIE, Case, Measurement, MeasurementSet, merge

# Unknown when the stock operators pack weights, so that no rule for them can test it.
_UNKNOWN_TO_STOCK = ("dynamic", "post_op", "batch", "spatial")
# Instead of a network, for shapes that stand for no layer of one.
PROBES_NET = "probes"
# What differs between cases of one layer.
_SIZES = (*_UNKNOWN_TO_STOCK, "rows", "each", "threads", "caller")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One op to choose a kernel for, and what each choice costs.

    Attributes:
        case: the case that was measured.
        spec: the op, as far as it is known when the kernel is chosen.
        cpu: what it was measured on.
        times: median microseconds of every kernel that may run it, at least one.
        losses: ln(time / best time) of these; 0 for ties, which are as good as the best.
        refused: why each other kernel may not run it.
        weight: 1, or a half where two samples stand for one case.
    """

    case: Case
    spec: OpSpec
    cpu: Cpu
    times: Mapping[str, float]
    losses: Mapping[str, float]
    refused: Mapping[str, str]
    weight: float = 1.0

    @property
    def networks(self) -> frozenset[str]:
        """The networks it occurs in; none for a probe between them."""
        return frozenset(net for net, _ in self.case.nets if net != PROBES_NET)

    @property
    def decided(self) -> bool:
        """Whether there was anything to choose."""
        return len(self.times) > 1


def samples(measured: MeasurementSet) -> tuple[Sample, ...]:
    """Every case that some kernel can run, in an order that the file's lines do not change."""
    cases = merge([measured]).cases()
    wrong = {(m.case.caller, shape_of(m.case.spec), m.kernel_name) for m in wrong_results(measured)}
    found: list[Sample] = []
    for case, candidates in cases.items():
        shape = (case.caller, shape_of(case.spec))
        usable = [m for m in candidates if m.kernel_name not in FORMER_KERNELS]
        found += _of_case(case, [m for m in usable if (*shape, m.kernel_name) not in wrong])
    return tuple(found)


def wrong_results(measured: MeasurementSet) -> tuple[Measurement, ...]:
    """Where a kernel differed from the reference; it may not run that shape at any size."""
    return tuple(m for m in measured if m.status == "wrong")


def shape_of(spec: OpSpec) -> OpSpec:
    """The layer without what it runs at: batch, rows, threads and the like."""
    return spec.replace(**dict.fromkeys(_SIZES))


def one_level(measured: MeasurementSet) -> str:
    """The ISA level that the measurements are of.

    Raises:
        MeasurementError: there are none, or of several levels.
    """
    levels = sorted({m.case.isa for m in measured})
    if len(levels) != 1:
        found = f"of the levels {', '.join(levels)}" if levels else "none"
        raise MeasurementError(
            f"{measured.path or 'measurements'}: {found}; a table is fitted to those of one level"
        )
    return levels[0]


def _of_case(case: Case, candidates: Sequence[Measurement]) -> list[Sample]:
    timed = [m for m in candidates if m.status == "ok"]
    exact = {m.kernel_name: m for m in timed if not m.narrow_weights}
    narrow = exact | {m.kernel_name: m for m in timed if m.narrow_weights}
    others = {m.kernel_name: m.note or m.status for m in candidates if m.status != "ok"}
    if exact.keys() == narrow.keys() or not exact:
        usual = tuple((exact or narrow).values())
        return [_sample(case, usual, others, 1.0)] if usual else []
    saturating = {name: m.note for name, m in narrow.items() if name not in exact}
    return [
        _sample(case, tuple(narrow.values()), others, 0.5),
        _sample(case, tuple(exact.values()), {**others, **saturating}, 0.5),
    ]


def _sample(
    case: Case, timed: Sequence[Measurement], refused: Mapping[str, str], weight: float
) -> Sample:
    best = min(timed, key=lambda m: _median(m))
    losses = {
        m.kernel_name: 0.0 if _ties(m, best) else math.log(_median(m) / _median(best))
        for m in timed
    }
    times = {m.kernel_name: _median(m) for m in timed}
    return Sample(case, as_routed(case), measured_cpu(case), times, losses, refused, weight)


def _median(m: Measurement) -> float:
    assert m.median_us is not None, f"{m.kernel_name} is ok but has no time"
    return m.median_us


def _ties(m: Measurement, best: Measurement) -> bool:
    assert m.low_us is not None
    assert best.high_us is not None
    return m.low_us <= best.high_us or _median(m) <= _median(best) * (1 + TIE)


def as_routed(case: Case) -> OpSpec:
    """The op as far as it is known when its kernel is chosen."""
    spec = case.spec.replace(caller=case.caller)
    if spec.op == "embedding_bag":
        return spec.replace(threads=None, each=None)
    if case.caller == "graph" and spec.dynamic:  # packed before it runs, as stock weights are
        return spec.replace(threads=None)
    if case.caller == "graph":
        return spec
    unknown = (*_UNKNOWN_TO_STOCK, "rows") if spec.transposed else _UNKNOWN_TO_STOCK
    return spec.replace(**dict.fromkeys(unknown))


def measured_cpu(case: Case) -> Cpu:
    """The CPU that a case was measured on, as far as rules can ask."""
    parts = re.fullmatch(r"(.+)-(\d+)-(\d+)", case.machine, re.ASCII)
    if parts is None:
        raise MeasurementError(f"machine {case.machine!r}: write vendor-family-model")
    vendor, family, model = parts.groups()
    features = LEVELS[case.isa].features
    return Cpu(vendor, case.machine, int(family), int(model), 0, features, case.isa)


# ---------------------------------------------------------------------------- choosing


class _MeasuredKernel:
    """A kernel as far as measurements tell, for ``choose``: legal where it was timed."""

    def __init__(self, reason: str | None) -> None:
        self._reasons = [] if reason is None else [reason]

    def missing_features(self, cpu: Cpu) -> list[str]:
        return []

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        return self._reasons


def choice_of(sample: Sample, table: RuleTable) -> Choice:
    """What ``table`` chooses for ``sample``, among the kernels that may run it."""
    registry = kernels_for(sample.case.caller, sample.case.spec)
    measured = {**dict.fromkeys(sample.times), **sample.refused}
    order = [name for name in registry if name in measured]
    order += sorted(measured.keys() - set(order))
    kernels: dict[str, Any] = {name: _MeasuredKernel(measured[name]) for name in order}
    return choose(sample.spec, cpu=sample.cpu, table=table, kernels=kernels)
