"""The accuracy kit: each step keeps the float model's function, and is kept where it helps.

Whether a step helps is judged on calls that it was not fitted to, where there are enough of them.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import nn

from x86quant.dynamic import to_dynamic
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.quantization import equalization, smoothing
from x86quant.quantization.batches import Call
from x86quant.quantization.bias_correction import BiasCorrection
from x86quant.quantization.harm import sqnr_between
from x86quant.quantization.part_search import FoundPart, Parts
from x86quant.quantization.proof import difference, run
from x86quant.quantization.running import feed_parts, outputs
from x86quant.quantization.scheme import Scheme
from x86quant.quantization.settings import Settings
from x86quant.quantization.simulation import SimulatedPart
from x86quant.quantization.state import state_kept
from x86quant.quantization.static_part import Ranges, StaticPart

_log = logging.getLogger("x86quant.quantization")


@dataclasses.dataclass(frozen=True, slots=True)
class Halves:
    """Calls that steps are fitted to, and others to judge them by; the same if there is one."""

    seen: tuple[Call, ...]
    unseen: tuple[Call, ...]

    @staticmethod
    def of(calls: tuple[Call, ...]) -> Halves:
        """Every other call is held back."""
        return Halves(calls, calls) if len(calls) < 2 else Halves(calls[::2], calls[1::2])


def smoothed_model(
    model: nn.Module, scheme: Scheme, halves: Halves, settings: Settings
) -> tuple[nn.Module, tuple[smoothing.Smoothed, ...]]:
    """``model`` with its layer norms smoothed, if that is wanted and helps, and what was done."""
    wanted = settings.smooth_quant
    if wanted is False or scheme.weight_only:
        return model, ()
    if not halves.seen:
        if wanted is True:
            raise InvalidInputError("smooth_quant=True needs calibration data")
        return model, ()
    if not any(isinstance(m, nn.LayerNorm) for m in model.modules()):
        return model, ()
    changed = copy.deepcopy(model)
    with state_kept(changed):
        done = smoothing.smooth(
            changed, halves.seen, per_token=scheme.dynamic, always=wanted is True
        )
    if not done or not _same_function(model, changed, halves.unseen):
        return model, ()
    if wanted == "auto" and scheme.dynamic:
        after, before = (_noise(model, _dynamic(one), halves.unseen) for one in (changed, model))
        if after < before:
            return model, ()
    return changed, done


def _dynamic(model: nn.Module) -> nn.Module:
    return to_dynamic(model)


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


def _noise(exact: nn.Module, actual: nn.Module, calls: Sequence[Call]) -> float:
    """Signal to noise in dB of all that ``actual`` returns."""
    with state_kept(exact), state_kept(actual):
        return sqnr_between(list(outputs(exact, calls)), list(outputs(actual, calls)))


def equalized_parts(
    model: nn.Module, parts: Parts, ranges: Ranges, halves: Halves, settings: Settings
) -> tuple[Parts, tuple[equalization.Equalized, ...]]:
    """``parts`` with their layers equalized, if that is wanted and helps, and what was done."""
    if settings.equalize is False:
        return parts, ()
    changed = dataclasses.replace(parts, found=tuple(map(_copied, parts.found)))
    seen = {part: equalization.ChannelRanges(part.traced.graph_module) for part in changed.found}
    feed_parts(model, halves.seen, {part: one.observe for part, one in seen.items()})
    done: tuple[equalization.Equalized, ...] = ()
    for part, found in seen.items():
        graph = part.traced.graph_module
        done += equalization.equalize(graph, found, part.path, always=settings.equalize is True)
    if not done:
        return parts, ()
    if not all(_same_graph(a, b) for a, b in zip(parts.found, changed.found, strict=True)):
        return parts, ()
    if settings.equalize == "auto":
        after, before = (_static_noise(model, one, ranges, halves) for one in (changed, parts))
        if after < before:
            return parts, ()
    return changed, done


def _copied(part: FoundPart) -> FoundPart:
    graph = copy.deepcopy(part.traced.graph_module)
    traced = dataclasses.replace(part.traced, graph_module=graph)
    return dataclasses.replace(part, traced=traced, prepared=None)


def _same_graph(before: FoundPart, after: FoundPart) -> bool:
    results = [run(part.traced.graph_module, part.example) for part in (before, after)]
    return difference(*results) is None


def _static_noise(model: nn.Module, parts: Parts, ranges: Ranges, halves: Halves) -> float:
    """Signal to noise with all of ``parts`` as if in int8, with ranges from the calls seen."""
    try:
        static = [StaticPart(p.path, p.traced, p.example, ranges) for p in parts.found]
    except UnsupportedError:
        return -torch.inf
    feed_parts(model, halves.seen, {part: part.calibrate for part in static})
    whole: nn.Module = model
    before = {part.path: model.get_submodule(part.path) for part in static}
    try:
        for part in static:
            names = [layer.name for layer in part.layers]
            simulated = SimulatedPart(part, names, before[part.path])
            if part.path:
                model.set_submodule(part.path, simulated)
            else:
                whole = simulated
        actual = list(outputs(whole, halves.unseen))
    finally:
        for path, module in before.items():
            if path:
                model.set_submodule(path, module)
    return sqnr_between(list(outputs(model, halves.unseen)), actual)


def correct_biases(
    model: nn.Module, parts: Sequence[StaticPart], halves: Halves, settings: Settings
) -> None:
    """Measure what rounding adds to each channel; whether it is taken off shows in the end."""
    if settings.bias_correction is False:
        return
    corrections = {part: BiasCorrection(part) for part in parts}
    feed_parts(model, halves.seen, {part: seen.observe for part, seen in corrections.items()})
    for part, found in corrections.items():
        part.corrections = found.corrections()
