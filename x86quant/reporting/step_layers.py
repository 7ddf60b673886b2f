"""The steps of a compiled model as rows of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from x86quant.compiled import CompiledModule
from x86quant.profiling import Profile, profile
from x86quant.profiling.recorder import record
from x86quant.profiling.run_step import RunStep
from x86quant.reporting.facts import LayerFacts, Precision, with_precision


def compiled_layers(
    compiled: CompiledModule,
    inputs: Sequence[Any],
    precision: Mapping[str, Precision],
    runs: int,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[tuple[LayerFacts, ...], Profile | None]:
    """A row for each step of a compiled model, and its profile unless ``runs`` is 0."""
    timed = profile(compiled, inputs, kwargs=kwargs, runs=runs) if runs else None
    if timed is None:
        steps, times = record(compiled, inputs, kwargs)[0], None
    else:
        steps = tuple(step.step for step in timed.steps)
        times = [step.microseconds for step in timed.steps]
    layers = tuple(
        _layer(step, None if times is None else times[i], precision.get(step.layer))
        for i, step in enumerate(steps)
    )
    return layers, timed


def _layer(step: RunStep, microseconds: float | None, precision: Precision | None) -> LayerFacts:
    facts = LayerFacts(step.layer, step.kind, step.kernel, step.rule, step.reason, microseconds)
    return with_precision(facts, precision)
