"""``report(model, path)``: gather all that can be known of a model, and write the page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.errors import InvalidInputError
from x86quant.profiling.recorder import example_call
from x86quant.quantization.batches import Calibration, Data
from x86quant.quantization.layer_statistics import statistics
from x86quant.quantization.scheme import MODES
from x86quant.quantization.sensitivity_ranking import sensitivity
from x86quant.quantization.summary import Summary
from x86quant.reporting.beside_float import beside_float, noise_shares
from x86quant.reporting.facts import LayerFacts, ModelReport
from x86quant.reporting.model_report import model_report


def report(
    model: nn.Module,
    path: str | os.PathLike[str],
    inputs: Sequence[Any] | torch.Tensor | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    float_model: nn.Module | None = None,
    data: Data | None = None,
    **options: Any,
) -> ModelReport:
    """Write a page of HTML about what ``model`` runs, how fast and how precisely.

    Args:
        model: what :func:`x86quant.compile` or :func:`x86quant.quantize` returned.
        path: where to.
        inputs: positional inputs to run on; by default what the model was compiled for or
            calibrated with.
        kwargs: keyword arguments to run on.
        float_model: the model it was made from, to tell both times, how far the outputs agree,
            which samples differ most, how precise each layer is, and who makes the noise.
        data: batches for that, as for ``quantize``; by default the inputs.
        options: ``runs`` and ``progress``, and as for ``x86quant.reporting.model_report``: title,
            precision, notes.

    Returns:
        The facts, which print as a table.
    """
    written = gathered(model, inputs, kwargs, float_model=float_model, data=data, **options)
    written.write(path)
    return written


def gathered(
    model: nn.Module,
    inputs: Sequence[Any] | torch.Tensor | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    float_model: nn.Module | None = None,
    data: Data | None = None,
    runs: int = 20,
    progress: bool = True,
    **options: Any,
) -> ModelReport:
    """The facts of :func:`report`, without a page."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if inputs is None and kwargs is None:
        inputs, kwargs = _known_arguments(model)
    arguments = tuple(inputs or ())
    done = getattr(model, "quantization", None)
    if done is not None:
        options.setdefault("notes", [("Quantization", str(done))])
    if float_model is None:
        return model_report(model, arguments, kwargs=kwargs, runs=runs, **options)
    given = [dict(kwargs) if kwargs else arguments] if data is None else data
    example = None if kwargs else arguments or None
    calls = Calibration(given, float_model, example_inputs=example).sample
    beside = beside_float(float_model, model, calls, runs)
    if isinstance(done, Summary):
        batches = [dict(call.kwargs) if call.kwargs else call.args for call in calls]
        found = statistics(float_model, model, batches, example_inputs=example)
        options["precision"] = {layer.name: layer for layer in found}
    written = model_report(model, arguments, kwargs=kwargs, runs=runs, **options)
    if isinstance(done, Summary) and done.int8_layers:
        alone = sensitivity(
            float_model,
            batches,
            layers=done.int8_layers,
            mode=done.mode if done.mode in MODES else "auto",
            example_inputs=example,
            progress=progress,
        )
        beside = dataclasses.replace(
            beside,
            noise=noise_shares(
                {layer.name: (layer.kind, layer.sqnr_db) for layer in alone},
                {layer.name: layer.float_us for layer in alone},
                _times_of(written.layers),
            ),
        )
    return written.with_float(beside)


def _times_of(layers: Sequence[LayerFacts]) -> dict[str, float]:
    """Microseconds of each layer, its steps together."""
    found: dict[str, float] = {}
    for layer in layers:
        if layer.microseconds is not None:
            found[layer.layer] = found.get(layer.layer, 0.0) + layer.microseconds
    return found


def _known_arguments(model: nn.Module) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if (known := example_call(model)) is not None:
        return known
    example = getattr(getattr(model, "quantization", None), "example", None)
    if example is not None:
        return example.args, example.kwargs
    raise InvalidInputError(
        f"a report runs the model, and what {type(model).__name__} takes is not known: "
        "give inputs=(x,), or kwargs={...}"
    )
