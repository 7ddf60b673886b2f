"""Runs a model that is compiled, whole or in parts, timing each step, and says what each is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.block_graphs import BlockGraphs
from x86quant.compiled.compiled_parts import compiled_parts, whole_graph
from x86quant.errors import InvalidInputError
from x86quant.profiling.run_log import RunLog
from x86quant.profiling.run_step import Elided, RunStep
from x86quant.profiling.timed_graph import elided, timed_graph
from x86quant.profiling.timed_layers import separate_layers, timed_layer


@dataclasses.dataclass(frozen=True)
class TimedRun:
    """One run of a model with timers.

    Attributes:
        result: what the model returned.
        microseconds: of the whole call.
        steps: microseconds of every step, in order.
        outside: microseconds that neither a compiled graph nor an int8 layer took.
    """

    result: Any
    microseconds: float
    steps: list[float]
    outside: float


class Recorder:
    """Runs ``model`` on its inputs, timing its steps, by the path that a plain run takes.

    While it runs, timed graphs stand for those that its compiled parts run; weights and plans are
    theirs. Other threads may run the model meanwhile.

    Attributes:
        steps: what the steps of a run are; as many as a run has times.
        plans: the plans of the native segments that run.

    Raises:
        InvalidInputError: all inputs are empty, or no step of ``model`` runs in int8.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._inputs, self._kwargs = tuple(inputs), dict(kwargs or {})
        values = (*self._inputs, *self._kwargs.values())
        given = [x.numel() for x in values if isinstance(x, torch.Tensor)]
        if given and not any(given):
            raise InvalidInputError("all inputs are empty: nothing native runs for them")
        self._model = model
        self._log = RunLog()
        model(*self._inputs, **self._kwargs)  # what torch has to run is known after that
        graphs = [
            (part, timed_graph(part, path, self._log)) for path, part in compiled_parts(model)
        ]
        self._graphs = graphs
        self._layers = [(layer, path) for path, layer in separate_layers(model)]
        self._log.describes = True
        first = self.run()
        self._log.describes = False
        # A fused graph looks again whether it still holds when something behind it is changed.
        self._graphs = [(part, timed) for part, timed in graphs if timed in self._log.ran]
        self.steps = tuple(self._log.steps)
        self.plans = tuple({id(plan): plan for plan in self._log.plans}.values())
        if not self.steps:
            raise _nothing_ran(model)
        assert len(first.steps) == len(self.steps)

    def run(self) -> TimedRun:
        """Run once more."""
        log = self._log
        log.start()
        with contextlib.ExitStack() as stack:
            for part, timed in self._graphs:
                stack.enter_context(part.running(timed))
            for layer, path in self._layers:
                stack.enter_context(timed_layer(layer, path, log))
            start = perf_counter()
            result = self._model(*self._inputs, **self._kwargs)
            elapsed = (perf_counter() - start) * 1e6
        # A compiled module is called from Python, too: that counts as time between its kernels.
        alone = isinstance(self._model, CompiledModule)
        outside = 0.0 if alone else elapsed - log.graphs_us - log.layers_us
        return TimedRun(result, elapsed, log.times(), outside)


def _nothing_ran(model: nn.Module) -> InvalidInputError:
    name = type(model).__name__
    if any(isinstance(vars(m).get("forward"), BlockGraphs) for m in model.modules()):
        return InvalidInputError(
            f"none of the graphs of {name} holds for these inputs, so its layers run one by one; "
            "give inputs like those that it was calibrated with"
        )
    return InvalidInputError(
        f"nothing compiled runs in {name} for these inputs; take what x86quant.quantize, "
        "x86quant.load or x86quant.compile(converted_model, example_inputs) returns"
    )


def record(
    compiled: CompiledModule,
    inputs: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[tuple[RunStep, ...], tuple[Elided, ...]]:
    """The steps of ``compiled`` for ``inputs``, and what needs none.

    Without ``inputs`` it is run on zeros of the shapes it was compiled for.
    """
    if inputs is None and not kwargs:
        inputs = example_inputs(compiled)
    with torch.no_grad():
        steps = Recorder(compiled, inputs or (), kwargs).steps
    return steps, tuple(e for segment in compiled.segments for e in elided(segment, steps))


def example_inputs(compiled: CompiledModule) -> tuple[torch.Tensor, ...]:
    """Zeros of the shapes that ``compiled`` was compiled for."""
    inputs = []
    for node in compiled.graph_module.graph.nodes:
        if node.op != "placeholder" or node.args:
            continue
        if node.meta.get("shape") is None or node.meta.get("input_dtype") is None:
            raise InvalidInputError(
                f"the shape of input {node.name!r} is not known; pass the inputs"
            )
        inputs.append(torch.zeros(node.meta["shape"], dtype=node.meta["input_dtype"]))
    return tuple(inputs)


def example_call(model: nn.Module) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
    """Arguments of the shapes that ``model`` was compiled for; None if it is not one graph."""
    graph = whole_graph(model)
    if graph is None:
        return None
    inputs = example_inputs(graph)
    return model.form.call(inputs) if isinstance(model, GuardedModule) else (inputs, {})
