"""From a calibrated model to the one that is returned: built, run, compared, timed.

Nothing is returned that has not run as a user would call it. What fails stays in float, and so do
the layers that cost too much accuracy, and what is slower in int8.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from x86quant.calling.state import state_kept
from x86quant.capture.variants import takes, variants
from x86quant.compiled.block_graphs import blocks_of
from x86quant.dynamic import note_in_config
from x86quant.quantization import speed
from x86quant.quantization.choices import Choices
from x86quant.quantization.deciding.layers_in_float import (
    good_enough,
    say_what_is_decided_otherwise,
    where_float_is_cheap,
    wide_enough,
    without_costly_steps,
)
from x86quant.quantization.deciding.no_slower import no_slower, slower_than
from x86quant.quantization.deciding.noise import judged
from x86quant.quantization.deciding.trials import that_runs
from x86quant.quantization.graphs.given_graphs import give_graphs, wants_graphs
from x86quant.quantization.settings import Settings


def checked(outcome: Choices, settings: Settings) -> Any:
    """The model that ``quantize`` returns: ``outcome``, mended where that is needed."""
    outcome, model = that_runs(outcome)
    if outcome.prepared.sample:
        outcome = judged(outcome, model)
        outcome, model = without_costly_steps(outcome, model)
        outcome, model = wide_enough(outcome, model)
        outcome, model = good_enough(outcome, model, at_any_cost=settings.effort == "best")
        if settings.speed_check and speed.can_tell():
            outcome, model = _quick(outcome, model, settings)
        elif _wants_graphs(outcome, model, settings):
            outcome = _with_graphs(outcome, model, settings)
        if not outcome.int8_layers:
            outcome = outcome.without_figures()
        say_what_is_decided_otherwise(outcome)
    result: Any = _settled(model, settings)
    result.quantization = outcome.summary()
    return result


def _quick(outcome: Choices, model: nn.Module, settings: Settings) -> tuple[Choices, nn.Module]:
    """``outcome`` without what is slower in int8 than in float, and, if that is wanted, without
    what hardly takes longer in float; with the graphs that it can have.

    What runs as graphs is timed as such: layer by layer a small transformer loses in int8.
    """
    wanted = _wants_graphs(outcome, model, settings)
    fused = _with_graphs(outcome, model, settings) if wanted else outcome
    as_graphs = None
    if fused is not outcome and _is_quick(fused, model):
        outcome, as_graphs = fused, functools.partial(_as_quick_graphs, settings=settings)
    else:
        if fused is not outcome:
            model = outcome.build()
        layers = outcome.int8_layers
        outcome, model = no_slower(outcome, model, outcome.prepared.sample)
        wanted = fused is not outcome or outcome.int8_layers != layers
    if settings.effort == "best":
        before = model
        outcome, model = where_float_is_cheap(outcome, model, as_graphs)
        wanted = wanted or model is not before
    if as_graphs is None and wanted and _wants_graphs(outcome, model, settings):
        outcome = _with_graphs(outcome, model, settings)
    return outcome, model


def _as_quick_graphs(
    outcome: Choices, model: nn.Module, settings: Settings
) -> tuple[Choices, nn.Module] | None:
    """``outcome`` with graphs in ``model``, if it has some by which it is no slower than float."""
    fused = _with_graphs(outcome, model, settings)
    return (fused, model) if fused is not outcome and _is_quick(fused, model) else None


def _is_quick(outcome: Choices, model: nn.Module) -> bool:
    """Whether ``model``, which has graphs, is no slower than float, nor is a part of it."""
    prepared = outcome.prepared
    reference, sample = prepared.reference, prepared.sample
    with state_kept(model), state_kept(reference):
        if blocks_of(model) is None:  # there is more than the graphs of parts
            ratios = speed.by_part(prepared.model, model, sample[0], list(outcome.units()))
            if any(ratio is not None for ratio in ratios.values()):
                return False
        return slower_than(reference, model, sample)[0] is None


def _settled(model: nn.Module, settings: Settings) -> nn.Module:
    """``model`` as it is returned: in evaluation mode, without gradients."""
    for x in model.parameters():
        x.detach_()  # of a copied ScriptModule they are computed, by clones
    note_in_config(model, settings.fuse_blocks)
    return model.requires_grad_(False).eval()


def _with_graphs(outcome: Choices, model: nn.Module, settings: Settings) -> Choices:
    """Give ``model`` the graphs that it can have; ``outcome`` itself, or with notes on them."""
    _settled(model, settings)
    tried = variants(outcome.prepared.sample, functools.partial(takes, model))
    for note in give_graphs(model, tried, settings.fuse_blocks):
        outcome = outcome.noting(note)
    return outcome


def _wants_graphs(outcome: Choices, model: nn.Module, settings: Settings) -> bool:
    """Whether blocks of dynamic layers are to run as graphs."""
    if settings.fuse_blocks == "auto" and not settings.speed_check:
        return False
    if not outcome.prepared.scheme.dynamic or not outcome.int8_layers:
        return False
    any_size = settings.effort != "fast" and speed.can_tell()
    call = outcome.prepared.sample[0]
    return wants_graphs(model, settings.fuse_blocks, call, any_size=any_size)
