"""Which layers to keep in float so that a metric holds: few, and cheap ones.

Layers are ranked by the harm they do alone for each microsecond that keeping them in float costs.
The shortest prefix of that ranking that holds the metric is found by doubling and halving; then
each layer of it that turns out not to be needed, dearest first, goes back to int8.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from x86quant.calling.wording import layers_stay, listed
from x86quant.errors import InvalidInputError
from x86quant.quantization.harm import harms
from x86quant.quantization.layer_times import float_costs
from x86quant.quantization.prepared import PreparedModel

_log = logging.getLogger("x86quant.quantization")

Metric: TypeAlias = Callable[..., float]

#: Scores are sums of floats: what differs by less than this is equal.
_SLACK = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One int8 model that was tried.

    Attributes:
        float_layers: what it kept in float, beside what the user asked for.
        score: its metric.
        cost_us: what these layers cost in float beyond int8, by their measured times.
        met: whether the target was met.
    """

    float_layers: tuple[str, ...]
    score: float
    cost_us: float
    met: bool

    def __str__(self) -> str:
        kept = listed(list(self.float_layers)) if self.float_layers else "none"
        met = "meets the target" if self.met else "misses it"
        return f"metric {self.score:.6g} {met}; in float: {kept} ({self.cost_us:+.0f} µs)"


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """How the search went.

    Attributes:
        float_score: the float model's metric.
        target: what an int8 model must reach.
        steps: every model that was tried, in order.
        best: the one that was returned.
        reasons: for each layer it keeps in float, why.
        finished: False if trials ran out.
    """

    float_score: float
    target: float
    steps: tuple[Trial, ...]
    best: Trial
    reasons: dict[str, str]
    finished: bool

    @property
    def met(self) -> bool:
        """Whether the returned model meets the target."""
        return self.best.met

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {**dataclasses.asdict(self), "met": self.met}

    def __str__(self) -> str:
        verdict = (
            f"target met; {layers_stay(self.best.float_layers)} in float"
            if self.met
            else "target not met: this is the best model found"
        )
        lines = [
            f"metric {self.best.score:.6g}, float {self.float_score:.6g}, "
            f"target {self.target:.6g}: {verdict} after {len(self.steps)} trials"
            + ("" if self.finished else ", the most allowed")
        ]
        lines += [f"  trial {n}: {step}" for n, step in enumerate(self.steps, start=1)]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The best model, and how it was found."""

    model: nn.Module
    result: SearchResult


def search(
    prepared: PreparedModel,
    metric: Metric,
    max_drop: float,
    kept: Collection[str],
    max_trials: int,
) -> Found:
    """The int8 model that holds ``metric`` with the fewest, cheapest layers in float.

    Args:
        prepared: the calibrated model.
        metric: of a model, higher is better.
        max_drop: how far it may fall.
        kept: layers that are in float anyway.
        max_trials: how many int8 models may be tried.
    """
    if max_trials < 1:
        raise InvalidInputError(f"max_trials must be at least 1, not {max_trials}")
    float_score = score_of(metric, prepared.model, "float")
    trials = _Trials(prepared, metric, float_score - max_drop, frozenset(kept), max_trials)
    _log.info("float metric %.6g, target %.6g", float_score, trials.target)
    order: list[str] = []
    if not trials.run(()).met:
        order = _ranking(prepared, trials, set(kept))
        chosen = _shortest_prefix(trials, order)
        _prune(trials, chosen)
    best, model = trials.best()
    harm = trials.harm
    reasons = {
        name: f"the metric needs it; alone in int8 it leaves {harm[name]:.1f} dB"
        for name in best.float_layers
    }
    finished = not trials.ran_out
    result = SearchResult(float_score, trials.target, tuple(trials.steps), best, reasons, finished)
    _log.info("%s", result)
    return Found(model, result)


class _Trials:
    """Builds and scores models, remembers the best, and stops at the limit."""

    def __init__(
        self,
        prepared: PreparedModel,
        metric: Metric,
        target: float,
        kept: frozenset[str],
        limit: int,
    ) -> None:
        self.target = target
        self.steps: list[Trial] = []
        self.costs: dict[str, float] = {}
        self.harm: dict[str, float] = {}
        self.ran_out = False
        self._prepared, self._metric, self._kept, self._limit = prepared, metric, kept, limit
        self._best: tuple[Trial, nn.Module] | None = None

    @property
    def left(self) -> bool:
        """Whether another trial is allowed. That it was refused once is remembered."""
        self.ran_out = self.ran_out or len(self.steps) >= self._limit
        return not self.ran_out

    def run(self, float_layers: Collection[str]) -> Trial:
        """Try the model with ``float_layers`` in float, beside those that are anyway."""
        model = self._prepared.build(self._kept | set(float_layers))
        score = score_of(self._metric, model, "int8")
        cost = sum(self.costs[name] for name in float_layers)
        step = Trial(tuple(float_layers), score, cost, score >= self.target - _SLACK)
        self.steps.append(step)
        _log.info("trial %d: %s", len(self.steps), step)
        if self._best is None or rank(step) > rank(self._best[0]):
            self._best = (step, model)
        return step

    def best(self) -> tuple[Trial, nn.Module]:
        """The best model so far."""
        assert self._best is not None
        return self._best


def rank(step: Trial) -> tuple[float, ...]:
    """Among those that meet the target the fewest and cheapest float layers, else the score."""
    if step.met:
        return (1.0, -len(step.float_layers), -step.cost_us)
    return (0.0, step.score, -step.cost_us)


def score_of(metric: Metric, model: nn.Module, what: str) -> float:
    """What ``metric`` gives ``model``, which errors call so; a finite number."""
    with torch.no_grad():
        given = metric(model)
    try:
        score = float(given)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInputError(
            f"the metric of the {what} model is a {type(given).__name__}; it must be a number"
        ) from None
    if not math.isfinite(score):
        raise InvalidInputError(f"the metric of the {what} model is {score}; it must be a number")
    return score


def _ranking(prepared: PreparedModel, trials: _Trials, kept: set[str]) -> list[str]:
    """Layers by harm for what they cost in float, most first."""
    names = [name for name in prepared.layers if name not in kept]
    trials.harm = {harm.name: harm.sqnr_db for harm in harms(prepared, names)}
    trials.costs = float_costs(prepared, names)
    noise = {name: 10 ** (-trials.harm[name] / 10) for name in names}
    return sorted(names, key=lambda name: -noise[name] / max(trials.costs[name], 1.0))


def _shortest_prefix(trials: _Trials, order: list[str]) -> list[str]:
    """The shortest prefix found that meets the target; all of it if none does."""
    low, high = 0, 1
    met: int | None = None
    for size in _doubling(len(order)):
        if not trials.left:
            break
        high = size
        if trials.run(order[:size]).met:
            met = size
            break
        low = size
    while met is not None and met - low > 1 and trials.left:
        middle = (low + met) // 2
        if trials.run(order[:middle]).met:
            met = middle
        else:
            low = middle
    return order[: met if met is not None else high]


def _doubling(most: int) -> Iterator[int]:
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _prune(trials: _Trials, chosen: list[str]) -> None:
    """Give back, dearest first, what is not needed."""
    if not trials.best()[0].met:
        return
    needed = list(chosen)
    for name in sorted(chosen[:-1], key=lambda name: -trials.costs[name]):
        if not trials.left:
            return
        without = [other for other in needed if other != name]
        if trials.run(without).met:
            needed = without
