"""``model_report(model, inputs)``: what a model runs, how fast and how precisely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from x86quant.compiled.compiled_parts import as_graph_call
from x86quant.explaining.int8_proof import compute_ops
from x86quant.profiling import Profile
from x86quant.reporting.facts import (
    ModelReport,
    Precision,
    duration,
    facts_of,
)
from x86quant.reporting.step_layers import compiled_layers


def model_report(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    title: str = "x86quant report",
    precision: Mapping[str, Precision] | None = None,
    notes: Sequence[tuple[str, str]] = (),
    runs: int = 20,
) -> ModelReport:
    """Profile ``model`` on ``inputs`` and gather what is known of it.

    Args:
        model: compiled, or what :func:`x86quant.quantize` made of it.
        inputs: the tuple of positional inputs to run it on.
        kwargs: and keyword arguments, which compiled models do not take.
        title: the heading.
        precision: by layer, how its result compares with the float model's.
        notes: headings and texts to add.
        runs: how often it is timed; 0 leaves times out.
    """
    known = precision or {}
    call = as_graph_call(model, inputs, kwargs or {})
    if call is None:
        from x86quant.reporting.mixed_report import mixed_report

        return mixed_report(
            model, inputs, kwargs or {}, title=title, precision=known, notes=notes, runs=runs
        )
    graph, inputs, kwargs = call
    layers, timed = compiled_layers(graph, inputs, known, runs, kwargs)
    facts = facts_of(
        compute_ops(graph, inputs, kwargs=kwargs), (*inputs, *(kwargs or {}).values()), layers
    )
    if timed is not None:
        facts |= _times(timed)
    return ModelReport(title, facts, layers, tuple(notes))


def _times(timed: Profile) -> dict[str, str]:
    return {
        "time": f"{duration(timed.wall_us / 1e6, timed.runs, timed.threads)}; "
        f"between kernels {timed.between_share:.1%}",
        "roofline": f"{timed.bound_us / timed.run_us:.0%} of the speed that this CPU allows",
        "memory": f"{timed.peak_bytes / 1024:.0f} KiB for activations",
    }
