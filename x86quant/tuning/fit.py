"""From measurements to a rule table: ``fit``.

The rules themselves are learned in ``x86quant.tuning.rule_learner``. Here they are put together:
one list for every caller and kind of op, what each rule rests on in words, what was found wrong,
the range of shapes that was measured, and the honest score. The same measurements give the same
table, byte for byte, whatever the order of their lines.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from x86quant.spec import OP_KINDS, OpSpec
from x86quant.tables.conditions import OPS, Pattern, parse_pattern
from x86quant.tables.shipped import find_table
from x86quant.tables.table import RADIUS, Denial, Rule, RuleTable, shape_in_table
from x86quant.tables.table_reader import read_table
from x86quant.tuning.measurements import Measurement, MeasurementSet
from x86quant.tuning.predicates import Mask
from x86quant.tuning.regret import UNSEEN, Judged, Score, baselines, leave_one_out, score
from x86quant.tuning.rule_learner import (
    Integers,
    Problem,
    RuleList,
    learn,
    losses_under,
    rule_pattern,
)
from x86quant.tuning.samples import Sample, one_level, samples, shape_of, wrong_results

#: Told how many of how many steps are done.
Progress = Callable[[int, int], None]

# What of the measurements' provenance a table repeats.
_PROVENANCE = (
    "cpu",
    "vendor",
    "family",
    "model",
    "isa",
    "torch",
    "onednn",
    "fbgemm",
    "x86quant",
    "threads",
    "date",
)


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A table, how good its like is on networks it has not seen, and the choices that say so."""

    table: RuleTable
    scores: tuple[Score, ...]
    unseen: tuple[Judged, ...]


def fit(
    measured: MeasurementSet,
    *,
    name: str | None = None,
    base: RuleTable | None = None,
    progress: Progress = lambda *_: None,
) -> Fitted:
    """The rule table that measurements of one ISA level make, and how good it is.

    Args:
        measured: all of one ISA level; other callers, threads and machines together.
        name: of the table; by default that of the level.
        base: where the look-up goes on; the table "default" unless given.
        progress: told while networks are left out in turn.

    Raises:
        MeasurementError: there are none, or of several levels.
    """
    level = one_level(measured)
    base = base or read_table(find_table("default"))
    found = samples(measured)
    denials = denials_of(wrong_results(measured))

    def fit_some(some: Sequence[Sample]) -> RuleTable:
        return _assemble(name or level, _problems(some), base, denials)

    table = fit_some(found)
    unseen = leave_one_out(found, fit_some, progress)
    scores = score(found, baselines(found), unseen)
    table = dataclasses.replace(
        table,
        description=f"Fitted to measurements on {measured.provenance.get('cpu', 'unknown CPU')}.",
        hardware=Pattern(*parse_pattern("*", {"isa": level})),
        provenance=_provenance(measured, found, scores),
    )
    return Fitted(table, tuple(scores), tuple(unseen))


# ---------------------------------------------------------------------------- rules


def _problems(found: Sequence[Sample]) -> list[Problem]:
    """What is learned apart: each caller, each kind of op, weights of 4 bits before others."""
    problems = []
    for caller in ("stock", "graph"):
        of_caller = [sample for sample in found if sample.case.caller == caller]
        for family in _families({sample.spec.op for sample in of_caller}):
            some = [sample for sample in of_caller if sample.spec.op in OPS[family]]
            few_bits = [sample for sample in some if sample.spec.weight_group]
            others = [sample for sample in some if not sample.spec.weight_group]
            problems += [Problem.of(part, family) for part in (few_bits, others) if part]
    return problems


def _families(ops: set[str]) -> list[str]:
    """Convolutions together: what holds for two kinds is the best guess for the third."""
    kinds = sorted(ops & OPS["conv"])
    return [
        *sorted(ops & {"linear"}),
        *(["conv"] if len(kinds) > 1 else kinds),
        *sorted(ops & {"embedding_bag"}),
    ]


def _assemble(
    name: str, problems: Sequence[Problem], base: RuleTable, denials: tuple[Denial, ...]
) -> RuleTable:
    rules: list[Rule] = []
    for problem in problems:
        rules += _as_rules(problem, learn(problem))
    named = tuple(
        dataclasses.replace(rule, name=f"{name}#{number}") for number, rule in enumerate(rules, 1)
    )
    named_denials = tuple(
        dataclasses.replace(denial, name=f"{name}:deny#{number}")
        for number, denial in enumerate(denials, 1)
    )
    return RuleTable(name, named, domain=_domain(problems), denials=named_denials, base=base)


def _as_rules(problem: Problem, learned: RuleList) -> Iterator[Rule]:
    first = problem.samples[0]
    when: dict[str, object] = {"caller": first.case.caller}
    if first.spec.weight_group:
        when["weight_bits"] = first.spec.bits
    own = parse_pattern("*", when)[1]
    default = losses_under(problem, learned.default)
    rest = np.ones(len(problem.samples), bool)
    below, evidence = default, []
    for rule in reversed(learned.rules):  # from the last up: `below` is what would run without it
        mine = losses_under(problem, rule.kernels)
        evidence.append(_evidence(problem, rule.covers, mine, below))
        below = np.where(rule.covers, mine, below)
        rest &= ~rule.covers
    for rule, because in zip(learned.rules, reversed(evidence), strict=True):
        pattern = rule_pattern(problem, rule.predicates)
        yield Rule(pattern.op, {**own, **pattern.when}, rule.kernels, because)
    yield Rule(problem.family, own, learned.default, _evidence(problem, rest, default))


def _evidence(problem: Problem, covers: Mask, mine: Integers, below: Integers | None = None) -> str:
    """What a rule rests on: how many cases, how much they gain, how often it is right."""
    some = [s for s, covered in zip(problem.samples, covers, strict=True) if covered]
    if not some:
        return "no case is left to it"
    weight = int(problem.weights[covers].sum())
    networks = {net for sample in some for net in sample.networks}
    level = int(problem.weights[covers & (mine == 0)].sum()) / weight
    cases = _counted(len({s.case for s in some}), "case")
    text = f"{cases} of {_counted(len(networks), 'network')}: "
    if below is None:
        return f"{text}best or level in {level:.0%}"
    gain = math.exp(int((below - mine)[covers].sum()) / weight)
    return f"{text}{gain:.2f} times as fast as by the rules below, best or level in {level:.0%}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


# ---------------------------------------------------------------------------- the rest


def _domain(problems: Sequence[Problem]) -> Pattern:
    """The products that the rules speak for: as wide as measured, and a little beyond."""
    specs = [
        sample.spec
        for problem in problems
        for sample in problem.samples
        if sample.spec.op in OP_KINDS
    ]
    when: dict[str, object] = {}
    if not specs:
        return Pattern("*", {})
    for name in ("in_channels", "out_channels"):
        sizes = [getattr(spec, name) for spec in specs]
        reach = math.exp(RADIUS)
        when[name] = f"{max(1, int(min(sizes) / reach))}..{math.ceil(max(sizes) * reach)}"
    if not any(spec.transposed for spec in specs):
        when["transposed"] = False
    if all(spec.bits is None for spec in specs):
        when["weight_bits"] = 8  # of 4 bits the table below speaks
    return Pattern(*parse_pattern("*", when))


def denials_of(wrong: Iterable[Measurement]) -> tuple[Denial, ...]:
    """A kernel that was wrong on a layer once may not run it at any size."""
    found: dict[tuple[OpSpec, str], Denial] = {}
    for m in wrong:
        spec = shape_in_table(shape_of(m.case.spec).replace(caller=m.case.caller))
        found.setdefault((spec, m.kernel_name), Denial(spec, m.kernel_name, m.note))
    return tuple(
        sorted(found.values(), key=lambda d: (str(d.spec), d.kernel, str(d.spec.caller), d.because))
    )


def _provenance(
    measured: MeasurementSet, found: Sequence[Sample], scores: Sequence[Score]
) -> dict[str, str | int | float]:
    said: dict[str, str | int | float] = {
        key: measured.provenance[key] for key in _PROVENANCE if key in measured.provenance
    }
    said["isa"] = one_level(measured)
    said["cases"] = len({sample.case for sample in found})
    said["networks"] = len({net for sample in found for net in sample.networks})
    return said | regret_facts(scores)


def regret_facts(scores: Sequence[Score]) -> dict[str, float]:
    """The scores as provenance: ``regret`` and the like; those of graph callers named so."""
    facts: dict[str, float] = {}
    for one in scores:
        caller = "" if one.caller == scores[0].caller else f"_{one.caller}"
        table = "" if one.table == UNSEEN else "_" + re.sub(r"\W+", "_", one.table)
        for figure in ("mean", "p95", "worst", "weighted"):
            key = f"regret{caller}{table}" + ("" if figure == "mean" else f"_{figure}")
            facts[key] = round(getattr(one.regret, figure), 4)
    return facts
