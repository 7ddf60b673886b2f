"""Learning an ordered list of rules from samples: few, short, and stable.

Sequential covering, by cost. A list begins with nothing but its default, the order of kernels that
loses least on all samples. Then, again and again, the conjunction of conditions and the kernel that
together win most over the default, on what no earlier rule covers, are found by beam search and
become the next rule, until none wins enough to be worth a line.

What a choice costs is ln(time / best time), so that a case where kernels differ by 2% can never
outvote one where they differ twofold; ties cost nothing. A rule whose kernel is not the best in
nearly all resamples of the networks, and of their layers, is dropped.

All sums are of whole numbers, so that the result depends on no order and no number of threads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from x86quant.tables.conditions import Pattern
from x86quant.tuning.predicates import Mask, Offer, Predicate, conditions, offer
from x86quant.tuning.samples import Sample, shape_of

Integers = NDArray[np.int64]

# One unit of loss: a millionth.
_UNIT = 1e6
# A loss beyond this factor counts as this factor: one stalled timing must not make a rule.
_MOST_LOSS = 16.0
# What a rule must win to be worth its line, and each of its conditions, in mean ln(time).
RULE_PRICE = 0.0003
CONDITION_PRICE = 0.0001
# A condition that wins less than this share of its rule is left out.
_WORTHLESS = 0.03
_MOST_RULES = 24
_MOST_CONDITIONS = 4
_BEAM = 64
# What wins only where several conditions hold loses under each of them alone. So that the search
# gets there, it is made with what is lost on the way counted in full, by half, and by a quarter.
_FORGIVING = (1, 2, 4)
# A rule must rest on so many layers: one may be an accident.
_FEWEST_LAYERS = 3

RESAMPLES = 200
#: In this share of resamples a rule's kernel must be the best, or the rule is dropped.
STABLE = 0.95


@dataclasses.dataclass(frozen=True)
class LearnedRule:
    """Conditions that must all hold, and the kernels that then run, the first that may.

    ``covers`` says for which samples: those that match, that no earlier rule covers, and that one
    of the kernels may run.
    """

    predicates: tuple[Predicate, ...]
    kernels: tuple[str, ...]
    covers: Mask


@dataclasses.dataclass(frozen=True)
class RuleList:
    """Rules, first match wins, and the order of kernels for the rest."""

    rules: tuple[LearnedRule, ...]
    default: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Samples of one caller and one kind of op, in numbers.

    Attributes:
        samples: what they are of.
        family: the kind of op: "linear", "conv2d", or "conv" for all.
        kernels: every kernel that may run one of them, sorted.
        weights: (samples), in units.
        legal: (samples, kernels) whether it may.
        losses: (samples, kernels) in units, weighted; 0 where the kernel may not run.
        offer: the conditions, over distinct ops.
        op_of: (samples) which distinct op a sample is.
        resamples: (samples, resamples) how often it is drawn.
    """

    samples: tuple[Sample, ...]
    family: str
    kernels: tuple[str, ...]
    weights: Integers
    legal: Mask
    losses: Integers
    offer: Offer
    op_of: Integers
    resamples: Integers

    @classmethod
    def of(cls, samples: Sequence[Sample], family: str) -> Problem:
        """The problem that these samples, at least one, pose."""
        kernels = tuple(sorted({name for sample in samples for name in sample.times}))
        weights = np.array([round(sample.weight * _UNIT) for sample in samples], np.int64)
        losses = np.array([[_loss(sample, name) for name in kernels] for sample in samples])
        ops = list(dict.fromkeys((sample.spec, sample.cpu) for sample in samples))
        number = {op: place for place, op in enumerate(ops)}
        return cls(
            samples=tuple(samples),
            family=family,
            kernels=kernels,
            weights=weights,
            legal=np.array([[name in sample.times for name in kernels] for sample in samples]),
            losses=np.rint(losses * weights[:, None]).astype(np.int64),
            offer=offer(ops),
            op_of=np.array([number[s.spec, s.cpu] for s in samples], np.int64),
            resamples=_resamples(samples),
        )

    def default(self, among: Mask) -> tuple[int, ...]:
        """The order of kernels that loses least on some of the samples."""
        return _best_order(self.legal[among], self.losses[among])

    def first_legal(self, order: Sequence[int]) -> Integers:
        """The first kernel of ``order`` that may run, for each sample; its first if none may."""
        ranked = self.legal[:, list(order)]
        chosen: Integers = np.array(order, np.int64)[ranked.argmax(axis=1)]
        return chosen


def _loss(sample: Sample, kernel: str) -> float:
    return min(sample.losses.get(kernel, 0.0), math.log(_MOST_LOSS))


def _best_order(legal: Mask, losses: Integers) -> tuple[int, ...]:
    """The order of kernels with the least cost; of equal ones, that by mean loss.

    What a kernel adds when it comes next depends on which came before, not on their order. So the
    best order of every set of kernels follows from those of the sets one smaller.
    """
    worst = int(losses.max(initial=0)) + 1
    mean = np.where(legal, losses, worst).sum(axis=0)
    by_mean = np.argsort(mean, kind="stable")
    # Samples that the same kernels may run count together.
    kinds, kind_of = np.unique(legal[:, by_mean], axis=0, return_inverse=True)
    lost = np.zeros(kinds.shape, np.int64)
    np.add.at(lost, kind_of.reshape(-1), losses[:, by_mean])
    best: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {frozenset(): (0, ())}
    for _ in by_mean:
        longer: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {}
        for before, (cost, order) in best.items():
            open_ = ~kinds[:, list(before)].any(axis=1)
            for k in set(range(len(by_mean))) - before:
                found = (cost + int(lost[open_ & kinds[:, k], k].sum()), (*order, k))
                longer[before | {k}] = min(longer.get(before | {k}, found), found)
        best = longer
    ((_, order),) = best.values()
    return tuple(by_mean[list(order)].tolist())


def _resamples(samples: Sequence[Sample]) -> Integers:
    """How often each sample is drawn in each resample: networks are drawn, then their layers.

    The draws of a network, and of a layer in it, follow from their names: they do not change when
    others come or go. Poisson draws, the bootstrap without a fixed size, make that possible.
    """
    draws = np.zeros((len(samples), RESAMPLES), np.int64)
    for number, sample in enumerate(samples):
        layer = str(shape_of(sample.spec))
        for net in sorted(sample.networks):
            draws[number] += _draws(net) * _draws(f"{net}/{layer}")
        if not sample.networks:
            draws[number] = _draws(layer)
    return draws


@functools.cache
def _draws(name: str) -> Integers:
    seed = zlib.crc32(name.encode())
    return np.random.default_rng(seed).poisson(1.0, RESAMPLES).astype(np.int64)


# ---------------------------------------------------------------------------- learning


def learn(problem: Problem) -> RuleList:
    """The rules for a problem."""
    open_ = np.ones(len(problem.samples), bool)
    rules: list[LearnedRule] = []
    while len(rules) < _MOST_RULES:
        rule = next_rule(
            problem, open_, gains_over_default(problem, open_), _patterns(problem, rules)
        )
        if rule is None:
            break
        rules.append(rule)
        open_ &= ~rule.covers
    rules = _without_superfluous(problem, _with_exceptions(problem, rules))
    order = problem.default(_uncovered(problem, rules))
    return RuleList(tuple(rules), tuple(problem.kernels[k] for k in order))


def _with_exceptions(problem: Problem, rules: list[LearnedRule]) -> list[LearnedRule]:
    """The rules behind those that win most over what they choose.

    A rule was the best there was over the default alone. Where another kernel wins over the rule's
    own, a rule for that comes first.
    """
    everything = np.ones(len(problem.samples), bool)
    while len(rules) < _MOST_RULES:
        gains = np.where(problem.legal, _chosen(problem, rules)[:, None] - problem.losses, 0)
        rule = next_rule(problem, everything, gains, ())
        if rule is None:
            break
        new = rule_pattern(problem, rule.predicates)
        rest = [r for r in rules if not new.covers(rule_pattern(problem, r.predicates))]
        better = _recovered(problem, [rule, *rest])
        if loss(problem, better) >= loss(problem, rules):
            break
        rules = better
    return rules


def _patterns(problem: Problem, rules: Sequence[LearnedRule]) -> list[Pattern]:
    return [rule_pattern(problem, rule.predicates) for rule in rules]


def rule_pattern(problem: Problem, predicates: Sequence[Predicate]) -> Pattern:
    """What a rule of these conditions is for."""
    pattern = conditions(predicates, problem.family)
    assert pattern is not None, "the search keeps possible conditions only"
    return Pattern(*pattern)


def next_rule(
    problem: Problem, open_: Mask, gains: Integers, earlier: Sequence[Pattern]
) -> LearnedRule | None:
    """The rule that wins most, of what its kernels win for each open sample, if it pays.

    A rule that an ``earlier`` one covers would never be reached where that one's kernel may run.
    """
    # Judging candidates needs the sum of each distinct op only.
    by_op = np.zeros((problem.offer.masks.shape[1], len(problem.kernels)), np.int64)
    np.add.at(by_op, problem.op_of, gains)
    found = sorted(
        (-worth, kernel, rows)
        for kernel in range(len(problem.kernels))
        for rows, worth in _search(problem, by_op[:, kernel])
    )
    tried: set[tuple[int, tuple[int, ...]]] = set()
    for _, kernel, long in found:
        rows = _simplified(problem, long, by_op[:, kernel])
        if (kernel, rows) in tried:
            continue
        tried.add((kernel, rows))
        predicates = tuple(problem.offer.predicates[row] for row in rows)
        pattern = rule_pattern(problem, predicates)
        matching = _matching(problem, rows)[problem.op_of] & open_
        if (
            not any(above.covers(pattern) for above in earlier)
            and _rests_on_enough(problem, matching, gains[:, kernel])
            and _stable(problem, matching, gains, kernel)
        ):
            use = _preferred(problem, matching, gains, kernel)
            covers = matching & problem.legal[:, list(use)].any(axis=1)
            return LearnedRule(predicates, tuple(problem.kernels[k] for k in use), covers)
    return None


def _preferred(problem: Problem, matching: Mask, gains: Integers, kernel: int) -> tuple[int, ...]:
    """The kernels for a rule, best first: the order that wins most, or ``kernel`` before others."""
    order = _best_order(problem.legal[matching], problem.losses[matching])
    forced = (kernel, *(k for k in order if k != kernel))
    return max((_winning(problem, matching, gains, o) for o in (order, forced)), key=_gain)[0]


def _gain(found: tuple[tuple[int, ...], int]) -> int:
    return found[1]


def _winning(
    problem: Problem, matching: Mask, gains: Integers, order: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Those of ``order`` that win over the default where none before may run; and what they win."""
    use: tuple[int, ...] = ()
    total = 0
    for kernel in order:
        rest = matching & ~problem.legal[:, list(use)].any(axis=1)
        won = int(gains[rest, kernel].sum())
        if won > 0 and _stable(problem, rest, gains, kernel):
            use, total = (*use, kernel), total + won
    return use, total


def gains_over_default(problem: Problem, open_: Mask) -> Integers:
    """(samples, kernels): what running a kernel wins over the default; 0 where it may not."""
    default = problem.first_legal(problem.default(open_))
    lost = problem.losses[np.arange(len(default)), default]
    gains = np.where(problem.legal & open_[:, None], lost[:, None] - problem.losses, 0)
    return gains.astype(np.int64)


def _price(problem: Problem, conditions: int) -> int:
    price = RULE_PRICE + CONDITION_PRICE * conditions
    return round(price * int(problem.weights.sum()))


def _search(problem: Problem, gains: Integers) -> list[tuple[tuple[int, ...], int]]:
    """Conjunctions, as rows of the offer, that win more than they are worth in lines."""
    winners: dict[tuple[int, ...], int] = {}
    for forgiving in _FORGIVING:
        winners |= _beam_search(problem, gains, np.where(gains < 0, gains // forgiving, gains))
    return sorted(winners.items(), key=lambda item: (-item[1], item[0]))


def _beam_search(problem: Problem, gains: Integers, hopes: Integers) -> dict[tuple[int, ...], int]:
    """Conjunctions that win, and what they win beyond their price.

    The most hopeful of each length are made one condition longer: of those that test the same
    features the best alone, since its likes with other bounds lead to the same.
    """
    # Floats hold these integers exactly, and multiply faster.
    masks = problem.offer.masks.astype(np.float64)
    features = [predicate.feature for predicate in problem.offer.predicates]
    blocks = {  # the conditions on one feature stand together
        feature: slice(features.index(feature), features.index(feature) + features.count(feature))
        for feature in features
    }
    winners: dict[tuple[int, ...], int] = {}
    beam: list[tuple[int, ...]] = [()]
    for length in range(1, _MOST_CONDITIONS + 1):
        inside = np.stack([_matching(problem, rows) for rows in beam], axis=1)
        hoped = masks @ (inside * hopes[:, None]).astype(np.float64)
        best: dict[tuple[str, ...], tuple[int, tuple[int, ...]]] = {}
        for column, rows in enumerate(beam):
            hoped[list(rows), column] = 0  # a condition that is there already adds nothing
        for feature, block in blocks.items():
            at = block.start + hoped[block].argmax(axis=0)
            for column, (row, rows) in enumerate(zip(at.tolist(), beam, strict=True)):
                longer = tuple(sorted((*rows, row)))
                found = (-int(hoped[row, column]), longer)
                tested = tuple(sorted((feature, *(features[row] for row in rows))))
                best[tested] = min(best.get(tested, found), found)
        ranked = [rows for hope, rows in sorted(best.values()) if hope < 0]
        beam = _distinct(problem, [rows for rows in ranked if _possible(problem, rows)])[:_BEAM]
        price = _price(problem, length)
        for rows in beam:
            total = int(gains[_matching(problem, rows)].sum())
            if total > price:
                winners[rows] = total - price
        if not beam:
            break
    return winners


def _distinct(problem: Problem, ranked: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without those that match the same ops as a better one."""
    seen: dict[bytes, tuple[int, ...]] = {}
    for rows in ranked:
        seen.setdefault(_matching(problem, rows).tobytes(), rows)
    return list(seen.values())


def _possible(problem: Problem, rows: tuple[int, ...]) -> bool:
    """Whether conditions, each of which can hold, can all hold together."""
    predicates = [problem.offer.predicates[row] for row in rows]
    if len({predicate.feature for predicate in predicates}) == len(predicates):
        return True  # nothing is said twice
    return conditions(predicates, problem.family) is not None


def _matching(problem: Problem, rows: Sequence[int]) -> Mask:
    """The distinct ops for which all these conditions hold."""
    matching: Mask = np.logical_and.reduce(problem.offer.masks[list(rows)], axis=0)
    return matching


def _simplified(problem: Problem, rows: tuple[int, ...], gains: Integers) -> tuple[int, ...]:
    """Without the conditions that hardly matter."""

    def gain(some: Sequence[int]) -> int:
        return int(gains[_matching(problem, some)].sum())

    whole = gain(rows)
    while len(rows) > 1:
        shorter = [rows[:at] + rows[at + 1 :] for at in range(len(rows))]
        best = max(shorter, key=gain)
        if gain(best) < (1 - _WORTHLESS) * whole:
            break
        rows = best
    return rows


def _rests_on_enough(problem: Problem, matching: Mask, gains: Integers) -> bool:
    shapes = {shape_of(problem.samples[i].spec) for i in np.flatnonzero(matching & (gains > 0))}
    return len(shapes) >= _FEWEST_LAYERS


def _stable(problem: Problem, matching: Mask, gains: Integers, kernel: int) -> bool:
    """Whether, where it may run, the kernel is the best choice in nearly all resamples.

    A resample without such samples says nothing: grouped convolutions may be those of one network.
    """
    where = matching & problem.legal[:, kernel]
    drawn = problem.resamples[where]
    totals = gains[where].T.astype(np.float64) @ drawn.astype(np.float64)
    present = drawn.any(axis=0)
    best = (totals[kernel] > 0) & (totals[kernel] >= totals.max(axis=0, initial=0))
    return bool(present.any()) and float(best[present].mean()) >= STABLE


def _uncovered(problem: Problem, rules: Sequence[LearnedRule]) -> Mask:
    covered = [rule.covers for rule in rules]
    return ~np.logical_or.reduce(covered) if covered else np.ones(len(problem.samples), bool)


def _without_superfluous(problem: Problem, rules: list[LearnedRule]) -> list[LearnedRule]:
    """Without the rules whose work later ones, or the default, would do nearly as well."""
    for at in range(len(rules) - 1, -1, -1):
        shorter = _recovered(problem, rules[:at] + rules[at + 1 :])
        price = _price(problem, len(rules[at].predicates))
        if loss(problem, shorter) - loss(problem, rules) <= price:
            rules = shorter
    return rules


def _recovered(problem: Problem, rules: Sequence[LearnedRule]) -> list[LearnedRule]:
    """The rules with what each covers now that others may have gone."""
    open_ = np.ones(len(problem.samples), bool)
    found = []
    row_of = {predicate: row for row, predicate in enumerate(problem.offer.predicates)}
    for rule in rules:
        matching = _matching(problem, [row_of[p] for p in rule.predicates])[problem.op_of]
        use = [problem.kernels.index(kernel) for kernel in rule.kernels]
        covers = matching & open_ & problem.legal[:, use].any(axis=1)
        found.append(dataclasses.replace(rule, covers=covers))
        open_ &= ~covers
    return found


def loss(problem: Problem, rules: Sequence[LearnedRule]) -> int:
    """What a list of rules with the best default loses over all samples, in units."""
    return int(_chosen(problem, rules).sum())


def _chosen(problem: Problem, rules: Sequence[LearnedRule]) -> Integers:
    """What each sample loses under a list of rules with the best default."""
    order = problem.default(_uncovered(problem, rules))
    chosen = losses_under(problem, [problem.kernels[k] for k in order])
    for rule in rules:
        chosen = np.where(rule.covers, losses_under(problem, rule.kernels), chosen)
    return chosen


def losses_under(problem: Problem, kernels: Sequence[str]) -> Integers:
    """What each sample loses where the first of ``kernels`` that may run does."""
    chosen = problem.first_legal([problem.kernels.index(kernel) for kernel in kernels])
    losses: Integers = problem.losses[np.arange(len(chosen)), chosen]
    return losses
