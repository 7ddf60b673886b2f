"""``model_report(model, inputs)``: what a model runs, how fast and how precisely."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import watched
from x86quant.compiled import CompiledModule
from x86quant.compiled.block_graphs import blocks_of
from x86quant.compiled.compiled_parts import as_graph_call
from x86quant.dynamic import INT8_LAYERS
from x86quant.explaining.explanation import LayerChoice, explain
from x86quant.explaining.int8_proof import compute_ops
from x86quant.profiling import Profile, profile
from x86quant.profiling.recorder import record
from x86quant.profiling.run_step import TORCH, RunStep
from x86quant.reporting.facts import (
    LayerFacts,
    ModelReport,
    Precision,
    duration,
    facts_of,
    with_precision,
)


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
        _step_layer(step, None if times is None else times[i], precision.get(step.layer))
        for i, step in enumerate(steps)
    )
    return layers, timed


def _step_layer(
    step: RunStep, microseconds: float | None, precision: Precision | None
) -> LayerFacts:
    facts = LayerFacts(
        step.layer, step.kind, step.kernel, step.rule, step.reason, microseconds,
        in_float=step.in_float,
    )  # fmt: skip
    return with_precision(facts, precision)


def mixed_report(
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    title: str,
    precision: Mapping[str, Precision],
    notes: Sequence[tuple[str, str]],
    runs: int,
) -> ModelReport:
    """Run ``model`` and list its compiled parts step by step, and its other layers, in order."""
    call: Callable[[], Any] = _WithArguments(model, tuple(inputs), dict(kwargs))
    with torch.no_grad():
        graphs = _fused_graphs(model, call)
        modules = dict(_layers(model, graphs))
        first_calls = _first_calls(modules, call)
        call()
        walls, times = _timed(modules, call, runs)
    choices = _choices(model)
    layers: list[LayerFacts] = []
    for name, first in first_calls.items():
        module = modules[name]
        if name in graphs:
            steps, _ = compiled_layers(*graphs[name], {}, runs)
            layers += [_within(name, step) for step in steps]
        elif isinstance(module, CompiledModule):
            steps, _ = compiled_layers(module, first.args, {}, runs)
            layers += [_within(name, step) for step in steps]
        else:
            layers.append(_layer(name, module, choices.get(name), times.get(name)))
    layers = [with_precision(layer, precision.get(layer.layer)) for layer in layers]
    proof = compute_ops(call, ())
    facts = facts_of(proof, inputs or tuple(kwargs.values()), layers)
    if walls:
        threads = torch.get_num_threads()
        facts["time"] = duration(statistics.median(walls), runs, threads)
    if graphs:
        names = ", ".join(name or "the whole model" for name in graphs)
        facts["fused blocks"] = (
            f"{names}: what is listed of {'it' if len(graphs) == 1 else 'them'} are the steps of "
            "the fused graph, which take the place of the layers"
        )
    return ModelReport(title, facts, tuple(layers), tuple(notes))


class _WithArguments(nn.Module):
    """A model and what to call it with; a module, so that its layers' names are found."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self._args, self._kwargs = model, args, kwargs

    def forward(self) -> Any:
        return self.model(*self._args, **self._kwargs)


_FusedGraphs = Mapping[str, tuple[CompiledModule, tuple[torch.Tensor, ...]]]


def _fused_graphs(model: nn.Module, call: Callable[[], Any]) -> _FusedGraphs:
    """The graphs that run in the place of layers in this call, by path, and their inputs."""
    blocks = {name: found for name, m in model.named_modules() if (found := blocks_of(m))}
    graphs = {}
    modules = {name: found.module for name, found in blocks.items()}
    for name, first in (_first_calls(modules, call) if modules else {}).items():
        if (graph := blocks[name].graph_for(first.args, first.kwargs)) is not None:
            graphs[name] = (graph[0].compiled, graph[1])
    return graphs


def _layers(
    module: nn.Module, graphs: _FusedGraphs, path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Fused and compiled parts, int8 layers, and float layers with weights of their own."""
    whole = path in graphs or isinstance(module, (CompiledModule, *INT8_LAYERS))
    if whole or next(module.parameters(recurse=False), None) is not None:
        yield path, module
    if not whole:
        for name, child in module.named_children():
            yield from _layers(child, graphs, f"{path}.{name}" if path else name)


def _first_calls(modules: Mapping[str, nn.Module], call: Callable[[], Any]) -> dict[str, Call]:
    """The arguments that each layer gets first, in the order of the calls."""
    found: dict[str, Call] = {}
    with watched(modules, before=found.setdefault):
        call()
    return found


def _timed(
    modules: Mapping[str, nn.Module], call: Callable[[], Any], runs: int
) -> tuple[list[float], dict[str, float]]:
    """Seconds of each run, and the median seconds a run of each layer."""
    walls: list[float] = []
    spent: dict[str, list[float]] = {}
    began: dict[str, float] = {}

    def before(name: str, *_: object) -> None:
        began[name] = perf_counter()

    def after(name: str, *_: object) -> None:
        spent[name][-1] += perf_counter() - began[name]

    with watched(modules, before, after):
        for _ in range(runs):
            for name in modules:
                spent.setdefault(name, []).append(0.0)
            call()
    for _ in range(runs):  # apart: hooks cost time
        start = perf_counter()
        call()
        walls.append(perf_counter() - start)
    return walls, {name: statistics.median(seconds) for name, seconds in spent.items()}


def _choices(model: nn.Module) -> dict[str, LayerChoice]:
    """The choice of each routed layer; of several, for different rows or products, the last."""
    found: dict[str, LayerChoice] = {}
    for choice in explain(model):
        found[choice.layer] = choice
        found.setdefault(choice.layer.rpartition(".")[0], choice)
    return found


def _within(part: str, step: LayerFacts) -> LayerFacts:
    return dataclasses.replace(step, layer=f"{part}.{step.layer}" if part else step.layer)


def _layer(
    name: str, module: nn.Module, choice: LayerChoice | None, seconds: float | None
) -> LayerFacts:
    microseconds = None if seconds is None else seconds * 1e6
    kind = type(module).__name__
    if choice is not None:
        kernel, rule, reason = choice.kernel, choice.rule, choice.reason
    elif isinstance(module, INT8_LAYERS):
        kernel, rule, reason = "native", "", "int8 weights, float arithmetic"
    else:
        kernel, rule, reason = TORCH, "", "a float layer"
    in_float = kernel == TORCH
    return LayerFacts(name, kind, kernel, rule, reason, microseconds, in_float=in_float)


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
