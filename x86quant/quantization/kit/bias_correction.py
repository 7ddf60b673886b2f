"""Bias correction: what rounding adds to a channel on average is taken off its bias.

Each layer is given the float model's own inputs, rounded as they will be, so errors of layers
before it do not pile up; the mean difference of each output channel is its correction.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node

from x86quant.calling.call import Call
from x86quant.quantization.kit.simulation import fake_activation, rounded_copy
from x86quant.quantization.static.static_part import StaticPart, is_weighted

#: The sum of each channel, and of how many values it is.
Sums = tuple[torch.Tensor, int]


class BiasCorrection:
    """Measures the corrections of a calibrated part over some batches.

    Attributes:
        exact: what the channels of each layer are in float, by path, for each batch.
    """

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
        self.exact: dict[str, list[Sums]] = {str(node.target): [] for node in nodes}
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
        if layer is None or rounded is None:
            return
        path = str(node.target)
        if not x.numel():
            self.exact[path].append((torch.zeros((), dtype=torch.float64), 0))
            return
        observer = self._part.observer_of(node.args[0])
        seen = x if observer is None else fake_activation(observer, x)
        actual, _ = channel_sums(rounded, seen)
        expected, count = channel_sums(layer, x)
        self.exact[path].append((expected, count))
        self._sums[path] = self._sums.get(path, torch.zeros((), dtype=torch.float32)) + (
            actual - expected
        )
        self._counts[path] = self._counts.get(path, 0) + count


#: So many samples are added as they lie.
_FEW = 64


def channel_sums(layer: nn.Module, x: torch.Tensor) -> Sums:
    """The sum of each output channel of ``layer`` on ``x``, and of how many values it is.

    Of a plain convolution it is the product of each weight with the sum of all inputs that it
    meets, which takes a small part of the convolution's time.
    """
    if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and _is_plain(layer):
        return _conv_sums(layer, x)  # type: ignore[arg-type]
    y = layer(x)
    channel = y.dim() - 1 if isinstance(layer, nn.Linear) else y.dim() - _dims(layer) - 1
    rows = y.transpose(0, channel).reshape(y.shape[channel], -1)  # of one sample, too
    return rows.double().sum(1), rows.shape[1]


def _conv_sums(layer: nn.Conv2d, x: torch.Tensor) -> Sums:
    dims = _dims(layer)
    batch = x.shape[0] if x.dim() == dims + 2 else 1
    # [channels, *spatial], then one dimension after another becomes that of its taps.
    maps = x.reshape(-1, *x.shape[-dims - 1 :])
    paddings: Any = layer.padding
    geometry = list(zip(layer.kernel_size, layer.stride, paddings, layer.dilation, strict=True))
    if all(one == (1, 1, 0, 1) for one in geometry):  # each value is met once
        outputs = batch * math.prod(x.shape[-dims:])
        return _total(layer, maps.sum(tuple(range(2, dims + 2))).double().sum(0), outputs), outputs
    sums, outputs = _over_samples(maps).double(), batch
    for dim, (taps, stride, padding, dilation) in enumerate(geometry, start=1):
        size = sums.shape[dim]
        count = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        outputs *= count
        met = []
        for tap in range(taps):
            first = tap * dilation - padding
            start = first if first >= 0 else first % stride
            stop = min(size, first + (count - 1) * stride + 1)
            inside = range(start, max(start, stop), stride)
            met.append(sums[(slice(None),) * dim + (slice(start, inside.stop, stride),)].sum(dim))
        sums = torch.stack(met, dim)
    return _total(layer, sums, outputs), outputs


def _over_samples(maps: torch.Tensor) -> torch.Tensor:
    """The sum of all samples."""
    if len(maps) > _FEW:
        return maps.sum(0)
    total = maps[0].clone()  # one after the other, where they lie: torch goes from one to the next
    for other in maps[1:]:
        total += other
    return total


def _total(layer: nn.Conv2d, met: torch.Tensor, outputs: int) -> torch.Tensor:
    """The sum of each output channel, given that of all that each weight has ``met``."""
    weight = layer.weight.detach().double()
    grouped = weight.reshape(layer.groups, -1, weight[0].numel())
    total = (grouped @ met.reshape(layer.groups, -1, 1)).flatten()
    if layer.bias is not None:
        total = total + layer.bias.detach().double() * outputs
    return total


def _is_plain(layer: nn.Module) -> bool:
    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return not hooked and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _dims(layer: nn.Module) -> int:
    """Spatial dimensions of a convolution."""
    return len(layer.kernel_size)  # type: ignore[arg-type]


class _Watcher(Interpreter):
    """The part in float. Its observers have seen this data: shown it again, they would count it
    twice, and ranges change under what is measured."""

    def __init__(self, correction: BiasCorrection) -> None:
        part = correction._part
        super().__init__(part.prepared, graph=part.float_graph)
        self._correction, self._nodes = correction, part.nodes

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module" and n.args and isinstance(n.args[0], Node):
            x = self.env[n.args[0]]
            if isinstance(x, torch.Tensor):
                self._correction.add(self._nodes[n.name], x)
        return super().run_node(n)
