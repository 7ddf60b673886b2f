"""The accuracy kit: each step keeps the float model's function, and is kept where it helps.

Whether a step helps is judged on calls that it was not fitted to, where there are enough of them.
Layer norms are smoothed before parts are traced, and ranges are chosen with layers equalized or as
they are; what is done to parts after that are ``STEPS``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.differences import difference
from x86quant.calling.running import Fed, feed_parts, outputs, run
from x86quant.calling.state import deep_copy, state_kept
from x86quant.dynamic import to_dynamic
from x86quant.errors import InvalidInputError, UnsupportedError, first_line
from x86quant.observing.activations import ObserverName
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.kit import equalization, smoothing
from x86quant.quantization.kit.bias_correction import BiasCorrection
from x86quant.quantization.kit.float_run import FloatRun, Onlooker
from x86quant.quantization.kit.halves import Halves
from x86quant.quantization.kit.learning import Learned, learned
from x86quant.quantization.kit.ordered_bias_correction import corrections_in_order
from x86quant.quantization.kit.simulation import simulated
from x86quant.quantization.kit.weight_feedback import WeightFeedback
from x86quant.quantization.scheme import Scheme
from x86quant.quantization.settings import Settings, Switch
from x86quant.quantization.static.part_search import FoundPart, Parts
from x86quant.quantization.static.static_part import Ranges, StaticPart
from x86quant.quantization.tracing.float_results import FloatResults

_log = logging.getLogger("x86quant.quantization")


def smoothed_model(
    model: nn.Module, scheme: Scheme, halves: Halves, settings: Settings
) -> tuple[nn.Module, tuple[smoothing.Smoothed, ...]]:
    """``model`` with its layer norms smoothed, if that is wanted and helps, and what was done."""
    wanted = settings.smooth_quant
    if _left_out(wanted, settings) or scheme.weight_only:
        return model, ()
    if not halves.seen:
        if wanted is True:
            raise InvalidInputError("smooth_quant=True needs calibration data")
        return model, ()
    if not any(isinstance(m, nn.LayerNorm) for m in model.modules()):
        return model, ()
    folds = halves.folds()
    fitted = halves.seen if len(folds) == 1 else halves.calls

    def smooth(calls: Sequence[Call]) -> tuple[nn.Module, tuple[smoothing.Smoothed, ...]]:
        changed = deep_copy(model)
        with state_kept(changed):
            done = smoothing.smooth(changed, calls, per_token=scheme.dynamic, always=wanted is True)
        return changed, done

    changed, done = smooth(fitted)
    if not done or not _same_function(model, changed, halves.unseen):
        return model, ()
    if wanted == "auto" and scheme.dynamic:
        plain = to_dynamic(model)
        exact: list[torch.Tensor] = []
        without: list[torch.Tensor] = []
        with_it: list[torch.Tensor] = []
        for fold in folds:
            other = changed if fold.seen is fitted else smooth(fold.seen)[0]
            for one, found in ((model, exact), (plain, without), (to_dynamic(other), with_it)):
                with state_kept(one):
                    found += outputs(one, fold.unseen)
        if sqnr_between(exact, with_it) < sqnr_between(exact, without):
            return model, ()
    return changed, done


def _same_function(before: nn.Module, after: nn.Module, calls: Sequence[Call]) -> bool:
    """Whether both compute the same: a weight, say, may also be used elsewhere."""
    for call in calls:
        with state_kept(before), state_kept(after):
            exact, changed = (list(outputs(model, [call])) for model in (before, after))
        reason = difference(exact, changed)
        if reason is not None:
            _log.info("a step of the accuracy kit is left out: %s", reason)
            return False
    return True


#: What is chosen among several, or learned, must gain so much on data not seen: less is chance.
_CLEARLY_DB = 0.3
#: Observers that are tried where time does not count, beside the one that is chosen without.
_OTHER_OBSERVERS: tuple[ObserverName, ...] = ("percentile", "minmax")


def calibrated_parts(
    exact: FloatResults, parts: Parts, ranges: Ranges, halves: Halves, settings: Settings
) -> tuple[Ranges, tuple[StaticPart, ...], tuple[equalization.Equalized, ...]]:
    """``parts`` calibrated on the calls seen, how, and what was equalized.

    With ``effort="best"`` other observers are tried, too: what has the least noise on calls not
    seen is taken.
    """
    first = (ranges, *_calibrated(exact, parts, ranges, halves, settings))
    if settings.effort != "best" or settings.observer != "auto" or halves.seen is halves.unseen:
        return first
    tried = [first]
    for name in _OTHER_OBSERVERS:
        other = dataclasses.replace(ranges, observer=name)
        tried.append((other, *_calibrated(exact, parts, other, halves, settings)))
    levels = [_simulated_noise(exact, some, halves.unseen) for _, some, _ in tried]
    best = levels.index(max(levels))
    return tried[best if levels[best] > levels[0] + _CLEARLY_DB else 0]


def _calibrated(
    exact: FloatResults, parts: Parts, ranges: Ranges, halves: Halves, settings: Settings
) -> tuple[tuple[StaticPart, ...], tuple[equalization.Equalized, ...]]:
    """``parts`` calibrated on the calls seen; what was equalized, where it is wanted and helps."""
    plain = tuple(part.static(ranges) for part in parts.found)
    watched = () if _left_out(settings.equalize, settings) else plain
    seen = {part: equalization.ChannelRanges(part.float_module) for part in watched}
    with contextlib.ExitStack() as stack:
        for part, found in seen.items():
            stack.enter_context(found.watching(part.prepared))
        _calibrate(exact, plain, halves)
    always = settings.equalize is True
    pairs = {
        part.path: equalization.worthwhile(found, part.path, always=always)
        for part, found in seen.items()
    }
    done = tuple(itertools.chain.from_iterable(pairs.values()))
    if not done:
        return plain, ()
    changed = tuple(_equalized(part, pairs[part.path]) for part in parts.found)
    if not all(_same_graph(a, b) for a, b in zip(parts.found, changed, strict=True)):
        return plain, ()
    try:
        equalized = tuple(part.static(ranges) for part in changed)
    except UnsupportedError:
        if always:
            raise
        return plain, ()
    _calibrate(exact, equalized, halves)
    if not always:
        after, before = (_simulated_noise(exact, x, halves.judges) for x in (equalized, plain))
        if after < before:
            return plain, ()
    return equalized, done


def _left_out(switch: Switch, settings: Settings) -> bool:
    """Whether a step is not wanted, or has to be judged and there is no time for that."""
    return switch is False or (switch == "auto" and settings.effort == "fast")


def _equalized(part: FoundPart, pairs: Sequence[equalization.Equalized]) -> FoundPart:
    """A copy of ``part`` with ``pairs`` of its layers rescaled."""
    graph = deep_copy(part.traced.graph_module)
    for pair in pairs:
        equalization.apply(graph, pair)
    return part.with_weights(graph)


def _same_graph(before: FoundPart, after: FoundPart) -> bool:
    inputs = before.small or before.example
    results = [run(part.traced.graph_module, inputs) for part in (before, after)]
    return difference(*results) is None


def _calibrate(exact: FloatResults, parts: Sequence[StaticPart], halves: Halves) -> None:
    """Show ``parts`` the calls seen."""
    feed_parts(exact.model, halves.seen, {part: part.calibrate for part in parts})


def _static_noise(exact: FloatResults, parts: Parts, ranges: Ranges, halves: Halves) -> float:
    """Signal to noise with all of ``parts`` as if in int8, with ranges from the calls seen."""
    try:
        static = [part.another(ranges) for part in parts.found]
    except UnsupportedError:
        return -torch.inf
    _calibrate(exact, static, halves)
    return _simulated_noise(exact, static, halves.unseen)


def _simulated_noise(
    exact: FloatResults,
    parts: Sequence[StaticPart],
    calls: Sequence[Call],
    *,
    held_back: bool = False,
) -> float:
    """Signal to noise with all of ``parts``, which are calibrated, as if in int8.

    With ``held_back`` by the ranges that were known before the last calls.
    """
    layers = {part: [layer.name for layer in part.layers] for part in parts}
    even = exact.even(calls)
    with simulated(exact.model, layers, held_back=held_back) as rounded:
        try:
            actual = list(outputs(exact.view(rounded), calls, even.flat))
        except Exception as error:  # the model's own code may not take what rounding makes
            _log.info("with all in int8 the model fails: %s", first_line(error))
            return -torch.inf
    return sqnr_between([even.flat(exact.judged(call)) for call in calls], actual)


def smoothing_helps(
    plain: tuple[FloatResults, Parts],
    smoothed: tuple[FloatResults, Parts],
    ranges: Ranges,
    halves: Halves,
) -> bool:
    """Whether static parts have less noise with smoothed layer norms, on calls not seen."""
    after, before = (_static_noise(*one, ranges, halves) for one in (smoothed, plain))
    return after >= before


@dataclasses.dataclass(slots=True)
class Calibrated:
    """Static parts whose ranges are chosen, and what steps on them go by.

    Attributes:
        exact: results of the float model.
        parts: what steps change.
        halves: calls to fit to, and to judge by.
        settings: what the user wants.
        level: signal to noise on a few calls not seen, if the last step has looked.
        biases: what tells how far biases are off, once it has seen a run in float.
    """

    exact: FloatResults
    parts: tuple[StaticPart, ...]
    halves: Halves
    settings: Settings
    level: float | None = None
    biases: Mapping[StaticPart, BiasCorrection] | None = None

    @property
    def can_judge(self) -> bool:
        """Whether there are calls that steps are not fitted to."""
        return self.halves.seen is not self.halves.unseen

    def judged_by_some(self) -> float:
        """Signal to noise on a few of the calls not seen."""
        return _simulated_noise(self.exact, self.parts, self.halves.judges)

    def judged(self) -> list[float]:
        """The same on all; and on those held back, by ranges from before them."""
        found = [_simulated_noise(self.exact, self.parts, self.halves.unseen)]
        held_back = self.halves.held_back
        if held_back and all(part.chosen_before for part in self.parts):
            found.append(_simulated_noise(self.exact, self.parts, held_back, held_back=True))
        return found

    def inputs(self) -> dict[StaticPart, list[Call]]:
        """What each part is given on the calls seen."""
        found: dict[StaticPart, list[Call]] = {part: [] for part in self.parts}
        self.show({part: kept.append for part, kept in found.items()})
        return found

    def show(self, observers: Mapping[Fed, Callable[[Call], Any]]) -> None:
        """Give each of ``observers`` what its part is given on the calls seen."""
        feed_parts(self.exact.model, self.halves.seen, observers)

    def look(self, onlookers: Mapping[StaticPart, Sequence[Onlooker]]) -> None:
        """Let ``onlookers`` look at the layers of their parts, in float, on the calls seen."""
        self.show({part: FloatRun(part, some).observe for part, some in onlookers.items()})


def feed_back(calibrated: Calibrated) -> None:
    """Let weights make up for each other's rounding, where that helps on calls not seen."""
    settings = calibrated.settings
    if settings.effort == "fast" or settings.weight_observer != "auto" or not calibrated.can_judge:
        return
    shown = len(calibrated.halves.seen)
    seen = {part: WeightFeedback(part, shown) for part in calibrated.parts}
    onlookers: dict[StaticPart, tuple[Onlooker, ...]]
    onlookers = {part: (one.take,) for part, one in seen.items()}
    if settings.bias_correction is not False:  # of whatever weights there are then: one run does
        calibrated.biases = {part: BiasCorrection(part) for part in calibrated.parts}
        for part, other in calibrated.biases.items():
            onlookers[part] += (other.take,)
    calibrated.look(onlookers)
    before = calibrated.judged_by_some()
    changed = {part: part.replace_weights(one.rounded()) for part, one in seen.items()}
    after = calibrated.judged_by_some()
    calibrated.level = max(before, after)
    if after <= before:
        for part, weights in changed.items():
            part.replace_weights(weights)


#: What to subtract from biases, by part and by path of the layer.
_Corrections = dict[StaticPart, dict[str, torch.Tensor]]


def correct_biases(calibrated: Calibrated) -> None:
    """Take what rounding adds to each channel off its bias, in the way that helps most, if any."""
    settings, parts = calibrated.settings, calibrated.parts
    if settings.bias_correction is False:
        return
    judged = (
        settings.bias_correction == "auto" and settings.effort != "fast" and calibrated.can_judge
    )
    ways = _CORRECTIONS if judged else _CORRECTIONS[:1]
    measured = calibrated.biases
    if measured is None:
        measured = {part: BiasCorrection(part) for part in parts}
        calibrated.look({part: (one.take,) for part, one in measured.items()})
    found: list[tuple[_Corrections, float]] = []
    for way in (None, *ways) if judged else ways:
        none: _Corrections = {part: {} for part in parts}
        corrections = none if way is None else way(calibrated, measured)
        for part in parts:
            part.corrections = corrections[part]
        if way is None and calibrated.level is not None:
            noise = calibrated.level
        else:
            noise = calibrated.judged_by_some() if judged else 0.0
        found.append((corrections, noise))
    best = _best(found)
    alone = _best(found[:2])
    for part in parts:
        part.corrections = best[part]
        part.corrections_alone = None if alone is best else alone[part]
    calibrated.level = None


def _best(found: Sequence[tuple[_Corrections, float]]) -> _Corrections:
    """Those of the least noise; among equals the last."""
    return max(reversed(found), key=operator.itemgetter(1))[0]


#: What was measured of each part.
_Measured = Mapping[StaticPart, BiasCorrection]


def _one_by_one(_: Calibrated, measured: _Measured) -> _Corrections:
    """Each layer on what the float model gives it."""
    return {part: one.corrections() for part, one in measured.items()}


def _in_order(calibrated: Calibrated, measured: _Measured) -> _Corrections:
    """Each layer on what those before it, corrected, give it."""
    return {
        part: corrections_in_order(part, calls, measured[part].exact)
        for part, calls in calibrated.inputs().items()
    }


#: The ways to correct biases, the quick one first.
_CORRECTIONS = (_one_by_one, _in_order)


#: Whether weights are rounded anew by what is learned: what gains most is kept.
_WITH_WEIGHTS = (False, True)


def learn(calibrated: Calibrated) -> None:
    """With ``effort="best"``, what can be learned from calls seen and helps on others."""
    if calibrated.settings.effort != "best" or not calibrated.can_judge:
        return
    before = {part: Learned.of(part) for part in calibrated.parts}
    best, levels = before, calibrated.judged()
    inputs = calibrated.inputs()
    for weights in _WITH_WEIGHTS:
        for part, one in before.items():
            one.give(part)
        for part, calls in inputs.items():
            if calls and (found := learned(part, calls, weights=weights)) is not None:
                found.give(part)
        changed = calibrated.judged()
        if all(x >= y + _CLEARLY_DB for x, y in zip(changed, levels, strict=True)):
            best, levels = {part: Learned.of(part) for part in calibrated.parts}, changed
    for part, one in best.items():
        one.give(part)


#: What is done to static parts once their ranges are chosen, in this order.
STEPS: tuple[Callable[[Calibrated], None], ...] = (feed_back, correct_biases, learn)


def take_steps(calibrated: Calibrated) -> None:
    """Do all of them."""
    for step in STEPS:
        step(calibrated)
