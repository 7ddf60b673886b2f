"""Ranges and biases learned by the error of the part's own results.

The part runs as in int8, but so that gradients go through what is rounded as if it were not. What
is learned is how much wider or narrower each range is, and what is added to each bias. These are
few values, and start from what calibration found, so that little data is enough for them.
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
from x86quant.observing.activations import ExtremesObserver
from x86quant.observing.observer import LARGEST
from x86quant.quantization.kit.simulation import Simulation, rounded_copy
from x86quant.quantization.static.static_part import StaticPart, is_weighted
from x86quant.quantization.tracing.recurrent_layers import is_recurrent_layer

_log = logging.getLogger("x86quant.quantization")

#: Rounds of gradient descent, and the step of Adam for the logarithms of ranges and for biases, in
#: steps of the result's codes.
_ROUNDS, _RANGE_RATE, _BIAS_RATE = 120, 3e-3, 2e-2


@dataclasses.dataclass(frozen=True, slots=True)
class Learned:
    """What one part is to have.

    Attributes:
        stretches: what ranges are multiplied by, by observer.
        corrections: what is subtracted from biases, by path.
    """

    stretches: dict[ExtremesObserver, float]
    corrections: dict[str, torch.Tensor]

    @staticmethod
    def of(part: StaticPart) -> Learned:
        """What ``part`` has now."""
        return Learned({x: x.stretch for x in _observers(part)}, dict(part.corrections))

    def give(self, part: StaticPart) -> None:
        """Let ``part`` have it."""
        for observer, stretch in self.stretches.items():
            observer.stretch = stretch
        part.corrections = dict(self.corrections)


def learned(part: StaticPart, calls: Sequence[Call]) -> Learned | None:
    """What makes the results of a calibrated ``part`` closest to float on ``calls`` of its graph.

    None where gradients do not go through it.
    """
    if any(is_recurrent_layer(part.module(layer.node)) for layer in part.layers):
        return None  # whose steps are one op without gradients
    with torch.no_grad():
        float_part = Interpreter(part.prepared, graph=part.float_graph)
        exact = [_floats(float_part.run(*call.args)) for call in calls]
    run = _Learning(part)
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

    def __init__(self, part: StaticPart) -> None:
        super().__init__(part, {layer.node.name for layer in part.layers}, None)
        self._ranges = {x: x.calculate_qparams() for x in _observers(part)}
        self._logs = {x: _leaf(torch.zeros((), dtype=torch.float32)) for x in self._ranges}
        self._biases: dict[str, torch.Tensor] = {}
        self._steps: dict[str, float] = {}
        for node in (layer.node for layer in part.layers):
            if (module := part.module(node)) is not None and is_weighted(module):
                path = str(node.target)
                self._biases[path] = _leaf(torch.zeros(_outputs(module), dtype=torch.float32))
                self._steps[path] = float(part.output_observer(node).calculate_qparams()[0])

    def groups(self) -> list[dict[str, Any]]:
        """What is learned, and how fast."""
        kinds = ((self._logs, _RANGE_RATE), (self._biases, _BIAS_RATE))
        return [{"params": list(kind.values()), "lr": rate} for kind, rate in kinds if kind]

    def found(self) -> Learned:
        """What was learned."""
        stretches = {x: x.stretch * math.exp(float(log.detach())) for x, log in self._logs.items()}
        with torch.no_grad():
            corrections = {path: -self._bias(path) for path in self._biases}
        return Learned(stretches, {**self._part.corrections, **corrections})

    def rounded(self, observer: Any, x: torch.Tensor) -> torch.Tensor:
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
        found: torch.Tensor = functional_call(layer, {"bias": bias}, (x,))
        return found

    def _bias(self, path: str) -> torch.Tensor:
        """What is added to the bias of the layer at ``path``."""
        before = self._part.corrections.get(path)
        new = self._biases[path] * self._steps[path]
        return new if before is None else new - before.float()


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


def _outputs(layer: Any) -> int:
    """How many output channels a convolution or linear has."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)
