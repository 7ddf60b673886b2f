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
    sample = outcome.prepared.sample
    if sample:
        outcome = judged(outcome, model)
        outcome, model = without_costly_steps(outcome, model)
        outcome, model = wide_enough(outcome, model)
        outcome, model = good_enough(outcome, model, at_any_cost=settings.effort == "best")
        if settings.speed_check:
            outcome, model = _quick(outcome, model, settings)
        if not outcome.int8_layers:
            outcome = outcome.without_figures()
        say_what_is_decided_otherwise(outcome)
    result: Any = _settled(model, settings)
    if sample and not _has_graphs(result) and _wants_graphs(outcome, result, settings):
        outcome = _with_graphs(outcome, result, settings)
    result.quantization = outcome.summary()
    return result


def _quick(outcome: Choices, model: nn.Module, settings: Settings) -> tuple[Choices, nn.Module]:
    """``outcome`` without what is slower in int8 than in float, and, if that is wanted, without
    what hardly takes longer in float.

    What runs as graphs is timed as such: layer by layer a small transformer loses in int8.
    """
    as_graphs = functools.partial(_as_quick_graphs, settings=settings)
    found = as_graphs(outcome, model)
    if found is not None:
        outcome, model = found
    else:
        if _has_graphs(model):  # which are not quick enough
            model = outcome.build()
        outcome, model = no_slower(outcome, model, outcome.prepared.sample)
    if settings.effort == "best" and speed.can_tell():
        return where_float_is_cheap(outcome, model, as_graphs if found else None)
    return outcome, model


def _as_quick_graphs(
    outcome: Choices, model: nn.Module, settings: Settings
) -> tuple[Choices, nn.Module] | None:
    """``outcome`` with graphs in ``model``, if it has some by which it is no slower than float."""
    if not _wants_graphs(outcome, model, settings) or not speed.can_tell():
        return None
    outcome = _with_graphs(outcome, _settled(model, settings), settings)
    if not _has_graphs(model):
        return None
    prepared = outcome.prepared
    reference, sample = prepared.reference, prepared.sample
    with state_kept(model), state_kept(reference):
        if blocks_of(model) is None:  # there is more than the graphs of parts
            ratios = speed.by_part(prepared.model, model, sample[0], list(outcome.units()))
            if any(ratio is not None for ratio in ratios.values()):
                return None
        loss, _ = slower_than(reference, model, sample)
    return None if loss else (outcome, model)


def _has_graphs(model: nn.Module) -> bool:
    return any(blocks_of(module) is not None for module in model.modules())


def _settled(model: nn.Module, settings: Settings) -> nn.Module:
    """``model`` as it is returned: in evaluation mode, without gradients."""
    for x in model.parameters():
        x.detach_()  # of a copied ScriptModule they are computed, by clones
    note_in_config(model, settings.fuse_blocks)
    return model.requires_grad_(False).eval()


def _with_graphs(outcome: Choices, model: nn.Module, settings: Settings) -> Choices:
    """Give ``model`` the graphs that it can have; ``outcome`` with notes on them."""
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
