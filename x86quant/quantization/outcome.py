"""From a calibrated model to the one that is returned: built, run, compared, timed.

Nothing is returned that has not run as a user would call it. What fails stays in float, and so do
the layers that cost too much accuracy, and what is slower in int8.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from x86quant.calling.call import Call
from x86quant.capture.variants import takes, variants
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
from x86quant.quantization.deciding.no_slower import no_slower
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
            outcome, model = no_slower(outcome, model, sample)
            if settings.effort == "best" and speed.can_tell():
                outcome, model = where_float_is_cheap(outcome, model)
        if not outcome.int8_layers:
            outcome = outcome.without_figures()
        say_what_is_decided_otherwise(outcome)
    for x in model.parameters():
        x.detach_()  # of a copied ScriptModule they are computed, by clones
    model.requires_grad_(False)
    note_in_config(model, settings.fuse_blocks)
    result: Any = model.eval()
    if sample and _wants_graphs(outcome, result, settings, sample[0]):
        tried = variants(sample, functools.partial(takes, result))
        for note in give_graphs(result, tried, settings.fuse_blocks):
            outcome = outcome.noting(note)
    result.quantization = outcome.summary()
    return result


def _wants_graphs(outcome: Choices, model: nn.Module, settings: Settings, call: Call) -> bool:
    """Whether blocks of dynamic layers are to run as graphs."""
    if settings.fuse_blocks == "auto" and not settings.speed_check:
        return False
    dynamic = outcome.prepared.scheme.dynamic and outcome.int8_layers
    return bool(dynamic) and wants_graphs(model, settings.fuse_blocks, call)
