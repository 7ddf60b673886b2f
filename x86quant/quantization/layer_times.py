"""How long layers take in float and in int8, measured in the model on calibration data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node

from x86quant.calling.call import Call
from x86quant.calling.running import Fed, feed_parts, watched
from x86quant.compiled import CompiledModule
from x86quant.compiled.compiled_parts import whole_graph
from x86quant.profiling import profile
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.static.static_part import StaticPart

_ROUNDS = 5
#: Without the compiled extension there is no int8 time: int8 is taken to be this much faster.
_USUAL_SPEEDUP = 3.0
#: So many times as long, and so much of what all layers take in float.
_MUCH_SLOWER, _WORTH_NAMING = 1.5, 0.02


def float_costs(prepared: PreparedModel, names: Collection[str]) -> dict[str, float]:
    """Microseconds a call that each layer named costs more in float than in int8.

    A layer that is no slower in float costs nothing.
    """
    in_float = float_times(prepared)
    in_int8 = _int8_times(prepared, prepared.build())
    costs = {}
    for name in names:
        slow = in_float.get(name, 0.0)
        costs[name] = max(slow - in_int8.get(name, slow / _USUAL_SPEEDUP), 0.0)
    return costs


def much_slower(
    prepared: PreparedModel, model: nn.Module, names: Collection[str]
) -> dict[str, float]:
    """How many times as long each layer named takes in the int8 ``model`` as in float.

    Those alone that are much slower, and take a part of the model's time worth naming; both times
    that they are looked for, since other work on the machine disturbs now this layer, now that one.
    """
    found = _slower_now(prepared, model, names)
    again = _slower_now(prepared, model, list(found)) if found else {}
    return {name: min(ratio, again[name]) for name, ratio in found.items() if name in again}


def _slower_now(
    prepared: PreparedModel, model: nn.Module, names: Collection[str]
) -> dict[str, float]:
    in_int8 = _int8_times(prepared, model)
    in_float = float_times(prepared)
    least = _WORTH_NAMING * sum(in_float.values())
    ratios = {}
    for name in names:
        slow, fast = in_int8.get(name, 0.0), in_float.get(name, 0.0)
        if fast and slow - fast > least and slow > _MUCH_SLOWER * fast:
            ratios[name] = slow / fast
    return ratios


def float_times(prepared: PreparedModel) -> dict[str, float]:
    """Median microseconds of each layer in float."""
    times: dict[str, float] = {}
    call = prepared.sample[0]
    stopwatches = {part: _Stopwatch(part) for part in prepared.parts}
    if stopwatches:
        observers: dict[Fed, Callable[[Call], Any]]
        observers = {part: stopwatch.observe for part, stopwatch in stopwatches.items()}
        feed_parts(prepared.model, [call] * _ROUNDS, observers)
    for part, stopwatch in stopwatches.items():
        by_node = {layer.node.name: layer.name for layer in part.layers}
        for layer in prepared.layers.values():
            if layer.part is part:
                node = next(n for n, name in by_node.items() if name == layer.layer)
                times[layer.name] = stopwatch.microseconds(node)
    times.update(module_times(prepared.model, _dynamic(prepared), call))
    return times


def _dynamic(prepared: PreparedModel) -> list[str]:
    """The layers that are in no static part."""
    return [layer.name for layer in prepared.layers.values() if layer.part is None]


def _int8_times(prepared: PreparedModel, model: nn.Module) -> dict[str, float]:
    """Microseconds of each layer in the int8 ``model``, where it can be told apart."""
    times: dict[str, float] = {}
    call = prepared.sample[0]
    given: dict[StaticPart, list[Call]] = {part: [] for part in prepared.parts}
    if given:
        feed_parts(prepared.model, [call], {part: kept.append for part, kept in given.items()})
    for part, kept in given.items():
        compiled = whole_graph(model.get_submodule(part.path))
        if compiled is not None and compiled.segments:
            times.update(_profiled(part, compiled, kept[0]))
    times.update(module_times(model, _dynamic(prepared), call))
    return times


def _profiled(part: StaticPart, compiled: CompiledModule, call: Call) -> dict[str, float]:
    """Microseconds of each layer of a ``part`` that is ``compiled``, on one call of it."""
    times: dict[str, float] = {}
    for step in profile(compiled, call.args, runs=_ROUNDS).steps:
        name = f"{part.path}.{step.step.layer}" if part.path else step.step.layer
        times[name] = times.get(name, 0.0) + step.microseconds
    return times


class _Stopwatch(Interpreter):
    def __init__(self, part: StaticPart) -> None:
        super().__init__(part.prepared, graph=part.float_graph)
        self._seconds: dict[str, list[float]] = {}

    def observe(self, call: Call) -> None:
        self.run(*call.args)

    def run_node(self, n: Node) -> Any:
        start = perf_counter()
        value = super().run_node(n)
        self._seconds.setdefault(n.name, []).append(perf_counter() - start)
        return value

    def microseconds(self, node: str) -> float:
        """The median time of one node."""
        return statistics.median(self._seconds[node]) * 1e6


def module_times(model: nn.Module, names: Collection[str], call: Call) -> dict[str, float]:
    """Median microseconds of the modules named, while ``model`` runs."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    started: dict[str, float] = {}

    def start(name: str, _: Call) -> None:
        started[name] = perf_counter()

    def stop(name: str, *_: Any) -> None:
        seconds[name].append(perf_counter() - started[name])

    modules = {name: model.get_submodule(name) for name in names}
    if not modules:
        return {}
    with torch.no_grad(), watched(modules, start, stop):
        for _ in range(_ROUNDS):
            call(model)
    return {name: statistics.median(taken) * 1e6 for name, taken in seconds.items() if taken}
