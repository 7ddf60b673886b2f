"""Ranges, biases and the rounding of weights, learned by the error of the part's own results.

The part runs as in int8, but so that gradients go through what is rounded as if it were not. What
is learned is how much wider or narrower each range is, what is added to each bias, and, if asked
for, where each weight lies between its codes (AdaQuant). Ranges and biases are few values, and
start from what calibration found, so that little data is enough for them; weights are many.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx import Interpreter, Node

from x86quant.calling.call import Call
from x86quant.errors import first_line
from x86quant.lowering.rounded import Int8Weight, RoundedLayer
from x86quant.observing.activations import ExtremesObserver
from x86quant.observing.observer import LARGEST
from x86quant.quantization.kit.simulation import Simulation, rounded_copy
from x86quant.quantization.static.static_part import StaticPart, is_weighted
from x86quant.quantization.tracing.recurrent_layers import is_recurrent_layer

_log = logging.getLogger("x86quant.quantization")

#: Rounds of gradient descent, and the step of Adam for the logarithms of ranges, for biases, in
#: steps of the result's codes, and for weights, in theirs.
_ROUNDS, _RANGE_RATE, _BIAS_RATE, _WEIGHT_RATE = 120, 3e-3, 2e-2, 1e-2
#: How far a weight may begin from its code.
_INSIDE = 0.49


@dataclasses.dataclass(frozen=True, slots=True)
class Learned:
    """What one part is to have.

    Attributes:
        stretches: what ranges are multiplied by, by observer.
        corrections: what is subtracted from biases, by path.
        weights: layers with other int8 weights.
    """

    stretches: dict[ExtremesObserver, float]
    corrections: dict[str, torch.Tensor]
    weights: dict[nn.Module, RoundedLayer]

    @staticmethod
    def of(part: StaticPart) -> Learned:
        """What ``part`` has now."""
        weights = {layer: part.rounded_layer(node, layer) for node, layer in _weighted(part)}
        stretches = {x: x.stretch for x in _observers(part)}
        return Learned(stretches, dict(part.corrections), weights)

    def give(self, part: StaticPart) -> None:
        """Let ``part`` have it."""
        for observer, stretch in self.stretches.items():
            observer.stretch = stretch
        part.corrections = dict(self.corrections)
        part.replace_weights(self.weights)


def learned(part: StaticPart, calls: Sequence[Call], *, weights: bool) -> Learned | None:
    """What makes the results of a calibrated ``part`` closest to float on ``calls`` of its graph.

    Weights are rounded anew if that is wanted. None where gradients do not go through it.
    """
    if any(is_recurrent_layer(part.module(layer.node)) for layer in part.layers):
        return None  # whose steps are one op without gradients
    with torch.no_grad():
        float_part = Interpreter(part.prepared, graph=part.float_graph)
        exact = [_floats(float_part.run(*call.args)) for call in calls]
    run = _Learning(part, weights=weights)
    optimizer = torch.optim.Adam(run.groups())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _ROUNDS)
    leaves = [x for group in optimizer.param_groups for x in group["params"]]
    for number in range(_ROUNDS):
        with torch.enable_grad():
            try:
                found = _floats(run.run(*calls[number % len(calls)].args))
                error = _error(found, exact[number % len(calls)])
                slopes = torch.autograd.grad(error, leaves, allow_unused=True)
            except RuntimeError as failed:  # of an op without gradients, or that writes in place
                _log.info("nothing is learned in %r: %s", part.path, first_line(failed))
                return None
        for leaf, slope in zip(leaves, slopes, strict=True):
            leaf.grad = None if slope is None else slope.nan_to_num(0.0, 0.0, 0.0)
        optimizer.step()
        schedule.step()
    return run.found()


def _observers(part: StaticPart) -> list[ExtremesObserver]:
    """Those of ``part`` whose ranges are free."""
    results = (part.output_observer(layer.node) for layer in part.layers)
    inputs = (part.observer_of(x) for layer in part.layers for x in layer.node.all_input_nodes)
    return list(dict.fromkeys(x for x in (*results, *inputs) if isinstance(x, ExtremesObserver)))


def _weighted(part: StaticPart) -> list[tuple[Node, nn.Module]]:
    """Convolutions and linears of ``part``, and what calls them."""
    found = ((layer.node, part.module(layer.node)) for layer in part.layers)
    return [(node, module) for node, module in found if module is not None and is_weighted(module)]


def _floats(results: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in results if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _error(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the results' squared errors, each as a share of its power."""
    total = torch.zeros((), dtype=torch.float32)
    for x, y in zip(found, exact, strict=True):
        bounded = y.abs() < LARGEST
        power = y.where(bounded, 0.0).square().sum().clamp(min=torch.finfo(torch.float32).tiny)
        total = total + (x - y).where(bounded, 0.0).square().sum() / power
    return total


class _Learning(Simulation):
    """A part as in int8, with what is learned."""

    def __init__(self, part: StaticPart, *, weights: bool) -> None:
        super().__init__(part, {layer.node.name for layer in part.layers}, None)
        self._ranges = {x: x.calculate_qparams() for x in _observers(part)}
        self._logs = {x: _leaf(torch.zeros((), dtype=torch.float32)) for x in self._ranges}
        self._biases: dict[str, torch.Tensor] = {}
        self._steps: dict[str, float] = {}
        self._weights: dict[nn.Module, _FreeWeight] = {}
        for node, module in _weighted(part):
            path = str(node.target)
            self._biases[path] = _leaf(torch.zeros(_outputs(module), dtype=torch.float32))
            self._steps[path] = float(part.output_observer(node).calculate_qparams()[0])
            if weights and module not in self._weights:
                self._weights[module] = _FreeWeight(module, part.rounded_layer(node, module))

    def groups(self) -> list[dict[str, Any]]:
        """What is learned, and how fast."""
        kinds = (
            (self._logs.values(), _RANGE_RATE),
            (self._biases.values(), _BIAS_RATE),
            ([weight.codes for weight in self._weights.values()], _WEIGHT_RATE),
        )
        return [{"params": list(kind), "lr": rate} for kind, rate in kinds if kind]

    def found(self) -> Learned:
        """What was learned."""
        stretches = {x: x.stretch * math.exp(float(log.detach())) for x, log in self._logs.items()}
        with torch.no_grad():
            corrections = {path: -self._bias(path) for path in self._biases}
        weights = {layer: free.found() for layer, free in self._weights.items()}
        return Learned(stretches, {**self._part.corrections, **corrections}, weights)

    def rounded(self, observer: Any, x: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """``x`` as codes say it, for gradients as if they were not rounded."""
        if observer not in self._ranges:
            return super().rounded(observer, x)
        scale, zero_point = self._ranges[observer]
        step, zero = scale.reshape(()) * self._logs[observer].exp(), int(zero_point)
        codes = x / step
        codes = codes + (codes.round() - codes).detach()
        return codes.clamp(int(observer.quant_min) - zero, int(observer.quant_max) - zero) * step

    def product(self, node: Node, x: torch.Tensor) -> torch.Tensor:
        """What the convolution or linear that ``node`` calls makes of ``x``."""
        layer: Any = rounded_copy(self._part, node)
        bias = self._bias(str(node.target))
        if layer.bias is not None:
            bias = bias + layer.bias
        others = {"bias": bias}
        module = self._part.module(node)
        if module in self._weights:
            others["weight"] = self._weights[module].real()
        found: torch.Tensor = functional_call(layer, others, (x,))
        return found

    def _bias(self, path: str) -> torch.Tensor:
        """What is added to the bias of the layer at ``path``."""
        before = self._part.corrections.get(path)
        new = self._biases[path] * self._steps[path]
        return new if before is None else new - before.float()


class _FreeWeight:
    """An int8 weight whose codes are chosen: real numbers that are rounded.

    Each starts where the float weight lies, as far as its code is the same then.
    """

    def __init__(self, layer: Any, rounded: RoundedLayer) -> None:
        self._rounded = rounded
        codes, scales, axis = rounded.weight
        shape = [-1 if dim == axis else 1 for dim in range(codes.dim())]
        step = scales.float().clamp(min=torch.finfo(torch.float32).tiny).reshape(shape)
        self._step = step
        start = (layer.weight.detach() / step).sub_(codes).clamp_(-_INSIDE, _INSIDE).add_(codes)
        self.codes = _leaf(start)

    def real(self) -> torch.Tensor:
        """The weight, for gradients as if it were not rounded."""
        return (self.codes + (self._whole() - self.codes).detach()) * self._step

    def _whole(self) -> torch.Tensor:
        return self.codes.detach().round().clamp_(-127, 127)

    def found(self) -> RoundedLayer:
        """The layer with the codes chosen."""
        before = self._rounded
        weight = Int8Weight(self._whole().to(torch.int8), before.weight.scales, before.weight.axis)
        return RoundedLayer(before.layer, weight, before.layer.bias)  # type: ignore[arg-type]


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


def _outputs(layer: Any) -> int:
    """How many output channels a convolution or linear has."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)
