"""``quantize``: a float model and some data in, an int8 model out."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram

from x86quant.calling.call import Call
from x86quant.calling.wording import alone
from x86quant.compiled import GuardedModule
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.observing.activations import ObserverName
from x86quant.observing.weights import WeightObserverName
from x86quant.onnx_models import is_onnx_source
from x86quant.onnx_models.calibration_data import model_and_data
from x86quant.ops.float_type import give_float_type, of_float_type
from x86quant.quantization.batches import Data
from x86quant.quantization.bits_by_layer import with_bits_by_layer
from x86quant.quantization.choices import Choices
from x86quant.quantization.no_worse import checked_by_effort
from x86quant.quantization.prepared import AS_ASKED
from x86quant.quantization.preparing import failing_batches_named, prepare
from x86quant.quantization.scheme import Mode, float_type
from x86quant.quantization.search import Metric, search
from x86quant.quantization.settings import Effort, Settings, Switch
from x86quant.quantization.static_recurrent import may_be_static, static_if_better
from x86quant.quantization.tracing.exported_programs import is_exported, with_layers, without_hook
from x86quant.unforeseen import described, is_own

if TYPE_CHECKING:
    from onnx import ModelProto

_log = logging.getLogger("x86quant.quantization")

_MAX_DROP = 0.01


def quantize(
    model: nn.Module | ExportedProgram | str | os.PathLike[str] | ModelProto,
    calibration: Data | None = None,
    *,
    mode: Mode = "auto",
    effort: Effort = "default",
    observer: ObserverName | Literal["auto"] = "auto",
    weight_observer: WeightObserverName | Literal["auto"] = "auto",
    activation_bits: int = 8,
    equalize: Switch = "auto",
    bias_correction: Switch = "auto",
    smooth_quant: Switch = "auto",
    fuse_blocks: Switch = "auto",
    metric: Metric | None = None,
    max_drop: float | None = None,
    evaluation: Any = None,
    max_trials: int = 24,
    float_layers: Collection[str | type] = (),
    example_inputs: Sequence[Any] | None = None,
    speed_check: bool = True,
    strict: bool = False,
    embedding_bits: int | None = None,
    weight_bits: int | Literal["auto"] = 8,
    weight_budget: int | None = None,
    progress: bool = True,
) -> nn.Module:
    """``model`` in int8: float in, float out, on whatever path is fastest for it.

    Args:
        model: any float module on the CPU, or an exported program; it is not changed. Or an ONNX
            model, or the path of its file, which is read by ``x86quant.from_onnx``.
        calibration: typical inputs, without which static ranges cannot be chosen: a DataLoader or
            any iterable of batches, each a tensor, a tuple of inputs (targets behind them are left
            out) or a mapping of keyword arguments; or one tensor of samples. For an ONNX model
            batches may be NumPy arrays, and mappings by the names in the file. For a model of
            sentence-transformers, sentences, or pairs of them. It is read once, as a stream. May
            be left out for the modes "dynamic" and "weight_only".
        mode: "static" calibrates ranges and runs the whole graph in int8; "dynamic" quantizes the
            inputs of linears token by token as they come; "weight_only" keeps arithmetic in float
            and weights in int8. "auto": transformers are dynamic, their convolutions and all other
            models static.
        effort: how much time to spend on accuracy. "fast" corrects biases and tries nothing;
            "default" tries each step of the accuracy kit; "best" also other observers, ranges and
            biases learned by gradients, and layers in float where that costs no time, which takes
            several times as long.
        observer: how activation ranges are chosen: "minmax", "histogram", "percentile", "mse" (the
            automatic choice) or "kl".
        weight_observer: "minmax" (the automatic choice), or "mse" to clip weights.
        activation_bits: 8, or 7 for stock kernels that saturate; ours do not.
        equalize: cross-layer equalization: True, False, or "auto" where it lowers noise clearly.
        bias_correction: take the mean error of rounding off the biases.
        smooth_quant: move outlier channels behind layer norms into the linears; as ``equalize``.
            With weights of 4 bits, large channels behind norms and linears, too, where that helps.
        fuse_blocks: run what is between dynamic linears (attention, norms, activations) fused with
            them, as graphs traced from the calibration data; "auto" keeps what is quicker by
            ``speed_check``, without which it does nothing, and with ``effort="fast"`` is for models
            of many weights, or much work a sample, which are worth some seconds of tracing.
        metric: ``metric(model)``, or ``metric(model, evaluation)`` if that is given: a number,
            higher is better. With it, layers that harm it stay in float.
        max_drop: how far the metric may fall below the float model's; 0.01 unless given.
        evaluation: handed to ``metric``.
        max_trials: how many int8 models the search may try.
        float_layers: layers to keep in float: names, names of containers, or classes.
        example_inputs: positional inputs, where their number is not clear from the batches.
        speed_check: time int8 against float at the end, for about a second, and leave in float
            what is clearly slower in int8; the float model itself comes back if that is all of it.
            Weight-only models, which are made to be small, are not timed.
        strict: raise at calls that an int8 graph does not hold for, instead of running them in
            float.
        embedding_bits: the bits of codes in embedding tables: 8, 4 or 2, in FBGEMM's row formats.
            None leaves tables in float, but for mode "weight_only". See docs/embeddings.md.
        weight_bits: of linears that quantize their inputs as they come, or keep them in float: 8,
            or 4 with a scale for each group of 32 input features. "auto": 4, and 8 where that helps
            most for its bytes: within ``weight_budget``, or in as few as hold ``metric``, or
            without either bring the results to 20 dB. See docs/four-bits.md.
        weight_budget: bytes that the codes and scales of all these linears may take, instead of a
            metric.
        progress: draw progress on stderr when that is a terminal.

    Returns:
        A module in evaluation mode; a ``CompiledModule`` if all of it is one static graph, or a
        ``GuardedModule`` around one if that does not hold for every call. It has run on the
        calibration data. Its attribute ``quantization`` is a ``Summary`` of what was done, which
        prints; ``x86quant.report`` writes a page about it.

    Raises:
        InvalidInputError: an argument or a batch is wrong.
        UnsupportedError: no part of the model can be quantized.
    """
    if max_drop is not None and metric is None:
        raise InvalidInputError("max_drop needs a metric: metric(model) -> float, higher is better")
    if metric is not None and weight_budget is not None:
        raise InvalidInputError(
            "give a metric or a weight_budget: layers that a metric keeps in float have no place "
            "in a budget"
        )
    if torch.is_autocast_enabled("cpu"):
        raise InvalidInputError(
            "quantize was called under torch.autocast, where the float model computes in "
            f"{torch.get_autocast_dtype('cpu')}: call it outside of that context"
        )
    if metric is not None and not callable(metric):
        raise InvalidInputError(
            f"metric must be a function, metric(model) -> float, not {metric!r}: x86quant does not "
            "know which data, and which of the results, a score of this name would be of"
        )
    if max_drop is not None and not max_drop >= 0:
        raise InvalidInputError(f"max_drop must not be negative, got {max_drop}")
    if not isinstance(model, nn.Module | ExportedProgram) and is_onnx_source(model):
        model, calibration = model_and_data(model, calibration)
    if is_exported(model):  # which refuses calls of other sizes than it was exported for
        model, strict = with_layers(model), True
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            f"model must be an nn.Module, not {type(model).__name__}; nor is it an "
            "exported program or the path of an ONNX model"
        )
    settings = Settings(
        mode=mode,
        effort=effort,
        observer=observer,
        weight_observer=weight_observer,
        activation_bits=activation_bits,
        equalize=equalize,
        bias_correction=bias_correction,
        smooth_quant=smooth_quant,
        fuse_blocks=fuse_blocks,
        example_inputs=example_inputs,
        speed_check=speed_check,
        strict=strict,
        embedding_bits=embedding_bits,
        weight_bits=weight_bits,
        weight_budget=weight_budget,
        progress=progress,
    )
    with alone(), _own_errors_in_a_sentence(model):
        prepared = prepare(model, calibration, settings)
        kept = prepared.layers_in(float_layers)
        scored = metric if evaluation is None or metric is None else _on(metric, evaluation)
        scored = _taking(float_type(model), scored)
        drop = _MAX_DROP if max_drop is None else max_drop
        if weight_bits == "auto":
            with failing_batches_named(prepared.reference, prepared.sample):
                prepared = with_bits_by_layer(prepared, kept, weight_budget, scored, drop)
        outcome = Choices(prepared, {name: AS_ASKED for name in prepared.layers if name in kept})
        if scored is not None:
            outcome = outcome.searched(search(prepared, scored, drop, kept, max_trials).result)
        with failing_batches_named(prepared.reference, prepared.sample):
            found: nn.Module = checked_by_effort(outcome, settings, float_layers)
            if metric is None and not kept and may_be_static(prepared, settings):
                found = static_if_better(found, prepared, settings)
    if isinstance(found, GuardedModule):
        without_hook(found)
    if (own := float_type(model)) is not torch.float32:
        found = _given_in(own, found, prepared.sample)
    _log.info("%s", found.quantization)
    return found


@contextlib.contextmanager
def _own_errors_in_a_sentence(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_own(error):
            raise
        raise UnsupportedError(
            f"{type(model).__name__} cannot be quantized: {described(error)}"
        ) from error


def _taking(float_type: torch.dtype, metric: Metric | None) -> Metric | None:
    """``metric`` of models that are shown inputs of ``float_type``, and compute in float32."""
    if metric is None or float_type is torch.float32:
        return metric

    def scored(model: nn.Module) -> float:
        with of_float_type(model, float_type):
            return metric(model)

    return scored


def _given_in(float_type: torch.dtype, found: nn.Module, sample: Sequence[Call]) -> nn.Module:
    """``found``, as a model of ``float_type`` would take its inputs."""
    name = str(float_type).removeprefix("torch.")
    note = f"the model was given in {name}; what is not int8 computes in float32"
    if any(x.is_floating_point() for call in sample for x in call.leaves):
        give_float_type(found, float_type)
        note += f", and {name} is what it takes and returns"
    summary: Any = found.quantization
    found.quantization = dataclasses.replace(summary, notes=(*summary.notes, note))
    return found


def _on(metric: Callable[..., float], evaluation: Any) -> Metric:
    return lambda model: metric(model, evaluation)
