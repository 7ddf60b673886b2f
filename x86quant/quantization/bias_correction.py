"""Bias correction: what rounding adds to a channel on average is taken off its bias.

Each layer is given the float model's own inputs, rounded as they will be, so errors of layers
before it do not pile up; the mean difference of each output channel is its correction.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node

from x86quant.calling.call import Call
from x86quant.quantization.simulation import fake_activation, rounded_copy
from x86quant.quantization.static_part import StaticPart, is_weighted


class BiasCorrection:
    """Measures the corrections of a calibrated part over some batches."""

    def __init__(self, part: StaticPart) -> None:
        nodes = [layer.node for layer in part.layers if is_weighted(part.module(layer.node))]
        # A layer used again and again meets its own errors, which one mean does not describe.
        calls = Counter(
            node.target for node in part.prepared.graph.nodes if node.op == "call_module"
        )
        nodes = [node for node in nodes if calls[node.target] == 1]
        self._part = part
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._rounded = {node.name: rounded_copy(part, node) for node in nodes}
        self._interpreter = _Watcher(self)

    def observe(self, call: Call) -> None:
        """Measure on one batch of the part's inputs."""
        with torch.no_grad():
            self._interpreter.run(*call.args)

    def corrections(self) -> dict[str, torch.Tensor]:
        """What to subtract from the bias of each layer, by path."""
        return {path: total / self._counts[path] for path, total in self._sums.items()}

    def add(self, node: Node, x: torch.Tensor) -> None:
        """Compare the layer of ``node`` with its rounded form on ``x``."""
        layer, rounded = self._part.module(node), self._rounded.get(node.name)
        if layer is None or rounded is None or not x.numel():
            return
        observer = self._part.observer_of(node.args[0])
        seen = x if observer is None else fake_activation(observer, x)
        error = rounded(seen) - layer(x)
        if isinstance(layer, nn.Linear):
            error = error.reshape(-1, error.shape[-1]).T
        else:
            error = error.transpose(0, error.dim() - _dims(layer) - 1).flatten(1)
        path = str(node.target)
        self._sums[path] = self._sums.get(path, torch.zeros(())) + error.double().sum(1)
        self._counts[path] = self._counts.get(path, 0) + error.shape[1]


def _dims(layer: nn.Module) -> int:
    """Spatial dimensions of a convolution."""
    return len(layer.kernel_size)  # type: ignore[arg-type]


class _Watcher(Interpreter):
    def __init__(self, correction: BiasCorrection) -> None:
        super().__init__(correction._part.prepared)
        self._correction = correction

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_module(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module" and n.args and isinstance(n.args[0], Node):
            x = self.env[n.args[0]]
            if isinstance(x, torch.Tensor):
                self._correction.add(n, x)
        return super().run_node(n)
