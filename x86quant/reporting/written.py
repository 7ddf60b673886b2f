"""``report(model, path)``: gather all that can be known of a model, and write the page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.errors import InvalidInputError
from x86quant.profiling.recorder import example_call
from x86quant.quantization.batches import Data
from x86quant.reporting.facts import ModelReport
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
        float_model: the model it was made from, to tell how precise each layer is.
        data: batches for that, as for ``quantize``; by default the inputs.
        options: as for ``x86quant.reporting.model_report``: title, precision, notes, runs.

    Returns:
        The facts, which print as a table.
    """
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if inputs is None and kwargs is None:
        inputs, kwargs = _known_arguments(model)
    arguments = tuple(inputs or ())
    if float_model is not None:
        from x86quant.quantization.layer_statistics import statistics

        batches = [dict(kwargs) if kwargs else arguments] if data is None else data
        found = statistics(float_model, model, batches, example_inputs=arguments or None)
        options["precision"] = {layer.name: layer for layer in found}
    done = getattr(model, "quantization", None)
    if done is not None:
        options.setdefault("notes", [("Quantization", str(done))])
    written = model_report(model, arguments, kwargs=kwargs, **options)
    written.write(path)
    return written


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
