"""How good a rule table is: what its choices cost over the best kernel of each case.

The regret of a case is ``time(chosen) / time(best) - 1``; a choice within noise or 3% of the best
has none. Cases that one kernel alone can run have nothing to choose and do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from x86quant.tables.shipped import find_table
from x86quant.tables.table import Rule, RuleTable
from x86quant.tables.table_reader import read_table
from x86quant.tuning.measurements import Case
from x86quant.tuning.samples import Sample, choice_of

#: Makes a table of samples; what leaving one out is done with.
Fit = Callable[[Sequence[Sample]], RuleTable]

#: The name of the choices that tables made without having seen the network.
UNSEEN = "fitted, network left out"


@dataclasses.dataclass(frozen=True)
class Judged:
    """A choice and what it costs, in one network.

    Attributes:
        sample: what was to be chosen for.
        network: for which of its networks this counts; empty where it is in none.
        kernel: what was chosen.
        regret: time over the best time, less 1.
        weight: 1, shared by the networks and samples of one case.
    """

    sample: Sample
    network: str
    kernel: str
    regret: float
    weight: float


@dataclasses.dataclass(frozen=True)
class Regret:
    """What is said of many judged choices.

    Attributes:
        cases: how many cases they are of.
        mean: geometric mean.
        p95: 95 of 100 are no worse.
        worst: the largest; ``worst_case`` says on which case with which kernel.
        weighted: each layer by its share of its network's time, networks alike.
    """

    cases: int
    mean: float
    p95: float
    worst: float
    weighted: float
    worst_case: str = ""

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2%}, 95th percentile {self.p95:.1%}, worst {self.worst:.1%}, "
            f"weighted {self.weighted:.2%}"
        )


def judge(table: RuleTable, samples: Sequence[Sample], network: str | None = None) -> list[Judged]:
    """What ``table`` chooses where there is a choice, for ``network`` or all of a sample's."""
    judged = []
    for sample in samples:
        if not sample.decided:
            continue
        kernel = choice_of(sample, table).kernel
        regret = math.expm1(sample.losses[kernel])
        networks = sorted(sample.networks) or [""]
        share = sample.weight / len(networks)
        for net in networks if network is None else [network]:
            judged.append(Judged(sample, net, kernel, regret, share))
    return judged


def leave_one_out(
    samples: Sequence[Sample], fit: Fit, progress: Callable[[int, int], None] = lambda *_: None
) -> list[Judged]:
    """Each network's choices by a table fitted to all cases that do not occur in it.

    A case that occurs in several networks is left out with each of them: no layer is ever judged
    by a table that has seen it.
    """
    networks = sorted({net for sample in samples for net in sample.networks})
    if len(networks) < 2:
        return []
    judged: list[Judged] = []
    for number, network in enumerate(networks):
        progress(number, len(networks))
        seen = [sample for sample in samples if network not in sample.networks]
        unseen = [sample for sample in samples if network in sample.networks]
        if seen:
            judged += judge(fit(seen), unseen, network)
    progress(len(networks), len(networks))
    return judged


def summarize(judged: Sequence[Judged]) -> Regret | None:
    """The figures; None where there was nothing to choose."""
    if not judged:
        return None
    regrets = np.array([j.regret for j in judged])
    weights = np.array([j.weight for j in judged])
    worst = max(judged, key=lambda j: j.regret)
    best = min(worst.sample.times, key=lambda name: worst.sample.times[name])
    where = f"{worst.sample.case}: {worst.kernel} instead of {best}"
    return Regret(
        cases=len({j.sample.case for j in judged}),
        mean=float(np.expm1(np.average(np.log1p(regrets), weights=weights))),
        p95=_percentile(regrets.tolist(), weights.tolist(), 0.95),
        worst=worst.regret,
        weighted=_weighted(judged),
        worst_case=where if worst.regret > 0 else "",
    )


def _percentile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    wanted, below = share * sum(weights), 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if below >= wanted - 1e-9:
            return value
    return max(values)


def by_network(judged: Sequence[Judged]) -> dict[str, float]:
    """What each network loses, its layers weighted by their cost: 0.02 is 2% more time.

    Where a network was measured at several batch sizes, threads and so on, their geometric mean.
    """
    lost: dict[str, dict[object, list[float]]] = {}
    for j in judged:
        count = dict(j.sample.case.nets).get(j.network, 1)
        best = min(j.sample.times.values()) * count * j.sample.weight
        sums = lost.setdefault(j.network, {}).setdefault(_setting(j.sample.case), [0.0, 0.0])
        sums[0] += best * j.regret
        sums[1] += best
    return {
        net: math.expm1(
            sum(math.log1p(extra / best) for extra, best in settings.values()) / len(settings)
        )
        for net, settings in sorted(lost.items())
    }


def _weighted(judged: Sequence[Judged]) -> float:
    networks = by_network(judged).values()
    return math.expm1(sum(map(math.log1p, networks)) / len(networks))


def _setting(case: Case) -> object:
    """What is the same for all layers of one run of a network."""
    spec = case.spec
    size = spec.batch if spec.dims else (spec.rows, spec.bits, spec.each)
    kind = "conv" if spec.dims else spec.op
    return (case.caller, case.isa, case.cache, kind, size, spec.threads, spec.dynamic, spec.post_op)


# ---------------------------------------------------------------------------- to compare with


def always(kernel: str) -> RuleTable:
    """The table that prefers one kernel; where it cannot run, the next that can does."""
    return RuleTable(f"always {kernel}", (Rule("*", {}, (kernel,), name=f"always {kernel}"),))


def baselines(samples: Sequence[Sample]) -> dict[str, RuleTable]:
    """Stock PyTorch's rules, and each kernel always, by name."""
    stock = read_table(find_table("pytorch-2.0"))
    found = {stock.name: stock}
    for kernel in sorted({name for sample in samples for name in sample.times}):
        found[f"always {kernel}"] = always(kernel)
    return found


@dataclasses.dataclass(frozen=True)
class Score:
    """Regret of one table on the cases of one caller."""

    caller: str
    table: str
    regret: Regret
    networks: Mapping[str, float]


def score(
    samples: Sequence[Sample], tables: Mapping[str, RuleTable], unseen: Sequence[Judged] = ()
) -> list[Score]:
    """The regret of every table, caller by caller, and first that of the ``unseen`` choices.

    The rules of stock PyTorch, and those of a kernel that only other callers have, say nothing of
    a caller; they are left out there.
    """
    scores: list[Score] = []
    for caller in sorted({sample.case.caller for sample in samples}, reverse=True):
        of_caller = [s for s in samples if s.case.caller == caller and s.decided]
        # Judged like the unseen choices: on layers of networks, if there are any.
        of_caller = [s for s in of_caller if s.networks] or of_caller
        kernels = {name for sample in of_caller for name in sample.times}
        rated = {UNSEEN: [j for j in unseen if j.sample.case.caller == caller]}
        for name, table in tables.items():
            if kernels & table.kernels().keys():
                rated[name] = judge(table, of_caller)
        for name, judged in rated.items():
            if regret := summarize(judged):
                scores.append(Score(caller, name, regret, by_network(judged)))
    return scores
