"""``x86quant tune --quick``: in a minute, the shipped table that fits this CPU best, corrected.

A few layers of each kind are measured. Every shipped table is judged by what its choices would have
cost on them. Where for one kind of layer another kernel is better throughout, a rule says so. If
the outcome beats the table in force, it becomes the user's own, which extends the shipped one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from x86quant.errors import RuleError
from x86quant.hardware.cpu import Cpu
from x86quant.kernels import kernel_names
from x86quant.routing.in_force import current_rules
from x86quant.spec import OpSpec
from x86quant.tables.conditions import Pattern, parse_pattern
from x86quant.tables.shipped import shipped_tables
from x86quant.tables.table import Rule, RuleTable
from x86quant.tables.table_reader import read_table
from x86quant.tables.user import is_user_table
from x86quant.tuning import session
from x86quant.tuning.cases import Grid, Shape
from x86quant.tuning.measurements import TIE, MeasurementSet
from x86quant.tuning.samples import Sample, choice_of, samples
from x86quant.tuning.user_table import users_table

#: Seconds that a quick tune takes at most, and what is kept of them for its start and its end.
LIMIT = 60.0
_RESERVE = 15.0
# Layers with more work than this say nothing that smaller ones do not, and take longer.
_MOST_WORK = 3 * 10**8
# A rule must rest on so many layers, and be the best or level in this share of them.
_FEWEST_LAYERS = 3
_AGREE = 0.75

#: The mark of a table made here, in its provenance.
QUICK = "quick"

#: The kinds of layer that are told apart: op, conditions.
KINDS: tuple[tuple[str, dict[str, object]], ...] = (
    ("linear", {"dynamic": False}),
    ("linear", {"weight_bits": 4, "rows": ">= 16"}),
    ("linear", {"weight_bits": 4}),
    ("linear", {"dynamic": True}),
    ("linear", {}),
    ("conv", {"depthwise": True}),
    ("conv", {"groups": "> 1", "depthwise": False}),
    ("conv", {"groups": 1, "kernel_max": 1}),
    ("conv", {"groups": 1, "kernel_max": "> 1"}),
    ("embedding_bag", {}),
)


@dataclasses.dataclass(frozen=True)
class Quick:
    """What a quick tune found.

    Attributes:
        cases: how many cases were measured in which there was something to choose.
        before: the table in force.
        table: the best one: a shipped table, or that with ``corrections`` above it.
        corrections: the rules above it.
        losses: the mean loss of each table looked at, by name: 0.02 is 2% over the best kernels.
        gain: time under ``before`` over time under ``table``, by the geometric mean.
    """

    cases: int
    before: RuleTable
    table: RuleTable
    corrections: tuple[Rule, ...]
    losses: dict[str, float]
    gain: float

    @property
    def worth_it(self) -> bool:
        """Whether the table found is better by more than noise."""
        return self.gain > 1 + TIE / 2

    def __str__(self) -> str:
        lines = [
            f"{name:<20} {loss:7.1%} over the best kernels" for name, loss in self.losses.items()
        ]
        lines += [f"  {rule}" for rule in self.corrections]
        base = self.table.base if self.corrections and self.table.base else self.table
        corrected = f" with {len(self.corrections)} corrections" if self.corrections else ""
        lines.append(
            f"best on {self.cases} measured cases: {base.name}{corrected}; "
            f"{self.gain:.3f} times as fast as {self.before.name}"
        )
        return "\n".join(lines)


def measure_few(
    shapes: Sequence[Shape], cpu: Cpu, limit: float = LIMIT, start: float | None = None
) -> MeasurementSet:
    """A few layers of each kind, measured until ``limit`` seconds after ``start`` (now)."""
    start = time.monotonic() if start is None else start
    with tempfile.TemporaryDirectory(prefix="x86quant-quick-") as folder:
        request = session.Request(
            shapes=tuple(_in_turn(shapes)),
            grid=Grid(
                batches=(1,),
                rows=(1, 64),
                weight_groups=(64,),
                bags=(128,),
                bits=(8, 4),
                caches=("hot",),
            ),
            levels=(cpu.isa,),
            out=Path(folder) / "quick.csv",
            budget=max(limit - _RESERVE - (time.monotonic() - start), 1.0),
        )
        return session.run(request).measured


def _in_turn(shapes: Sequence[Shape]) -> Iterator[Shape]:
    """The shapes, one of each kind after the other, so that a short time has seen all kinds."""
    kinds: dict[object, list[Shape]] = {}
    for shape in shapes:
        spec = shape.spec
        work = spec.replace(rows=64, batch=1).multiply_adds
        if (spec.in_channels * spec.out_channels if work is None else work) > _MOST_WORK:
            continue
        kind = (spec.op, spec.depthwise, spec.groups > 1, max(spec.kernel, default=0) > 1)
        kinds.setdefault(kind, []).append(shape)
    spread = ([some[n] for n in _spread(len(some))] for some in kinds.values())
    for row in itertools.zip_longest(*spread):
        yield from (shape for shape in row if shape is not None)


def _spread(length: int) -> list[int]:
    """0 .. length - 1 such that the first few are far apart: networks differ more than layers."""
    bits = max(1, (length - 1).bit_length())
    turned = (int(f"{n:0{bits}b}"[::-1], 2) for n in range(2**bits))
    return [n for n in turned if n < length]


def evaluate(measured: MeasurementSet, cpu: Cpu) -> Quick | None:
    """The best table for what was measured; None where there was nothing to choose."""
    found = [sample for sample in samples(measured) if sample.decided]
    if not found:
        return None
    before = current_rules(cpu)
    tables = {table.name: table for table in (before, *_shipped())}
    losses = {name: _mean_loss(table, found) for name, table in tables.items()}
    # Of equals the one in force, which comes first.
    best = tables[min(losses, key=lambda name: round(losses[name], 4))]
    corrections = tuple(_corrections(best, found)) if not is_user_table(best) else ()
    table = best
    if corrections:
        table = _above(best, corrections, cpu)
        losses["with corrections"] = _mean_loss(table, found)
    ordered = dict(sorted(losses.items(), key=lambda item: item[1]))
    gain = math.exp(_mean_log(before, found) - _mean_log(table, found))
    cases = len({sample.case for sample in found})
    return Quick(cases, before, table, table.rules if corrections else (), ordered, gain)


def as_user_table(quick: Quick, cpu: Cpu) -> RuleTable:
    """What is installed: the corrections, or nothing, above the shipped table that fits best.

    Where none is better than the one in force, this says that it has been tried on this CPU.
    """
    if not quick.worth_it:
        return _above(quick.before, (), cpu)
    return quick.table if quick.corrections else _above(quick.table, (), cpu)


def keeps_own_rules(table: RuleTable) -> bool:
    """Whether ``table`` is the user's, with rules that more than a minute went into."""
    return is_user_table(table) and bool(table.rules) and QUICK not in table.provenance


def _above(best: RuleTable, corrections: Sequence[Rule], cpu: Cpu) -> RuleTable:
    """The user's table with ``corrections`` for its rules, extending ``best``; entries stay."""
    table = users_table(cpu)
    named = (
        dataclasses.replace(rule, name=f"{table.name}#{number}")
        for number, rule in enumerate(corrections, 1)
    )
    return dataclasses.replace(
        table,
        rules=tuple(named),
        base=best,
        description=f"{best.name}, of the shipped tables, fits {cpu.name} best (quick tune).",
        provenance={**table.provenance, QUICK: "yes"},
    )


def _shipped() -> Iterator[RuleTable]:
    for path in shipped_tables().values():
        try:
            yield read_table(path, kernel_names())
        except RuleError:
            continue


def _mean_log(table: RuleTable, found: Iterable[Sample]) -> float:
    """The mean of ln(time chosen / best time)."""
    total = weight = 0.0
    for sample in found:
        total += sample.weight * sample.losses[choice_of(sample, table).kernel]
        weight += sample.weight
    return total / weight


def _mean_loss(table: RuleTable, found: Iterable[Sample]) -> float:
    return math.expm1(_mean_log(table, found))


def _corrections(table: RuleTable, found: Sequence[Sample]) -> Iterator[Rule]:
    """A rule for each caller and kind of layer for which one kernel is better throughout."""
    for caller in ("stock", "graph"):
        left = [sample for sample in found if sample.case.caller == caller]
        for op, when in KINDS:
            pattern = Pattern(*parse_pattern(op, {"caller": caller, **when}))
            some = [s for s in left if pattern.matches(s.spec, s.cpu)]
            left = [s for s in left if s not in some]
            layers: set[OpSpec] = {s.case.spec.replace(rows=None, batch=None) for s in some}
            if len(layers) < _FEWEST_LAYERS:
                continue
            rule = _better(table, pattern, some)
            if rule is not None:
                yield rule


def _better(table: RuleTable, pattern: Pattern, some: Sequence[Sample]) -> Rule | None:
    now = [sample.losses[choice_of(sample, table).kernel] for sample in some]
    best: tuple[float, str] | None = None
    for kernel in sorted({name for sample in some for name in sample.times}):
        with_it = [s.losses.get(kernel, old) for s, old in zip(some, now, strict=True)]
        agree = sum(new <= old for new, old in zip(with_it, now, strict=True)) / len(some)
        won = (sum(now) - sum(with_it)) / len(some)
        if agree >= _AGREE and won > math.log1p(TIE) and (best is None or won > best[0]):
            best = (won, kernel)
    if best is None:
        return None
    won, kernel = best
    because = f"quick tune: {math.exp(won):.2f} times as fast on {len(some)} measured cases"
    return Rule(pattern.op, pattern.when, (kernel,), because)
