"""Int8 weights that make up for each other's rounding, by what a layer is given (GPTQ).

Tap after tap of a weight is rounded, and what that changes in the results is taken off the taps
that are still to come. Scales stay as they are. A layer is given the float model's inputs, rounded
as they will be; of their windows as many as are needed to tell which taps go together.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Interpreter, Node

from x86quant.calling.call import Call
from x86quant.lowering.rounded import Int8Weight, RoundedLayer
from x86quant.quantization.kit.simulation import fake_activation
from x86quant.quantization.static.static_part import StaticPart

#: What is added to the squares of all taps, as a share of their mean: windows are few.
_DAMPING = 0.01
#: Taps of a layer, beyond which it takes too long; and of how many windows of a call.
_MOST_TAPS, _WINDOWS = 1152, 1024
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and the sums of products of what its taps meet, [groups, taps, taps]."""

    node: Node
    module: Any
    squares: torch.Tensor


class WeightFeedback:
    """Chooses codes for the weights of a calibrated part over some batches."""

    def __init__(self, part: StaticPart) -> None:
        calls = Counter(n.target for n in part.prepared.graph.nodes if n.op == "call_module")
        self._part = part
        self._layers: dict[str, _Layer] = {}
        for node in (layer.node for layer in part.layers):
            module: Any = part.module(node)
            if type(module) not in _KINDS or calls[node.target] > 1 or _taps(module) > _MOST_TAPS:
                continue
            groups = getattr(module, "groups", 1)
            squares = torch.zeros(groups, _taps(module), _taps(module), dtype=torch.float32)
            self._layers[node.name] = _Layer(node, module, squares)
        self._interpreter = _GivenInputs(part, self._take)

    def observe(self, call: Call) -> None:
        """Look at one batch of the part's inputs."""
        with torch.no_grad():
            self._interpreter.run(*call.args)

    def rounded(self) -> dict[nn.Module, RoundedLayer]:
        """Each layer with the codes chosen for it; without those that were given infinities."""
        found: dict[nn.Module, RoundedLayer] = {}
        for one in self._layers.values():
            if not bool(torch.isfinite(one.squares).all()):
                continue
            plain = self._part.rounded_layer(one.node, one.module)
            codes = _codes(one.module.weight.detach(), plain.weight, one.squares)
            weight = Int8Weight(codes, plain.weight.scales, plain.weight.axis)
            found[one.module] = RoundedLayer(one.module, weight, one.module.bias)
        return found

    def _take(self, node: Node, x: torch.Tensor) -> None:
        layer = self._layers.get(node.name)
        if layer is None or not x.numel():
            return
        observer = self._part.observer_of(layer.node.args[0])
        windows = _windows(layer.module, x if observer is None else fake_activation(observer, x))
        layer.squares.baddbmm_(windows.transpose(1, 2), windows)


def _taps(layer: Any) -> int:
    """How many values make one result of ``layer``."""
    return int(layer.weight[0].numel())


def _windows(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Some of what the weight of ``layer`` meets in ``x``, [groups, windows, taps]."""
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])
        return rows[_some(len(rows))].unsqueeze(0)
    dims = layer.weight.dim() - 2
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    maps = x.reshape(-1, *x.shape[-dims - 1 :])
    padded = F.pad(maps, layer._reversed_padding_repeated_twice, mode).movedim(1, -1)
    geometry = list(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True))
    counts = [
        (size - dilation * (taps - 1) - 1) // stride + 1
        for size, (taps, stride, dilation) in zip(padded.shape[1:-1], geometry, strict=True)
    ]
    image, *places = torch.unravel_index(
        _some(len(padded) * math.prod(counts)), (len(padded), *counts)
    )
    index = [image.view(-1, *[1] * dims)]
    for dim, (place, (taps, stride, dilation)) in enumerate(zip(places, geometry, strict=True)):
        along = place[:, None] * stride + torch.arange(taps) * dilation
        index.append(along.view(-1, *(taps if d == dim else 1 for d in range(dims))))
    found = padded[tuple(index)].movedim(-1, 1)
    return found.reshape(len(found), layer.groups, -1).transpose(0, 1)


def _some(count: int) -> torch.Tensor:
    """The numbers of some of ``count`` windows."""
    if count <= _WINDOWS:
        return torch.arange(count)
    return torch.randint(count, (_WINDOWS,), generator=torch.Generator().manual_seed(0))


def _codes(weight: torch.Tensor, plain: Int8Weight, squares: torch.Tensor) -> torch.Tensor:
    """Codes of ``weight`` at the scales of ``plain``, given what its taps meet."""
    groups, taps, _ = squares.shape
    left = weight.reshape(groups, -1, taps).clone()
    scales = plain.scales.float().expand(len(weight)).reshape(groups, -1)
    steps = scales.clamp(min=torch.finfo(torch.float32).tiny)
    spread = _spread(squares)
    codes = torch.empty_like(left)
    for tap in range(taps):
        code = (left[..., tap] / steps).round_().clamp_(-127, 127)
        codes[..., tap] = code
        change = (left[..., tap] - code * steps) / spread[:, tap, tap, None]
        left[..., tap:] -= change[..., None] * spread[:, None, tap, tap:]
    return codes.reshape(weight.shape).to(torch.int8)


def _spread(squares: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of each of ``squares``: who makes up for whom."""
    damped = squares.double()
    mean = damped.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    damped.diagonal(dim1=1, dim2=2).add_(_DAMPING * mean.where(mean > 0, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


class _GivenInputs(Interpreter):
    """The part in float, whose observers are left alone."""

    def __init__(self, part: StaticPart, take: Any) -> None:
        super().__init__(part.prepared, graph=part.float_graph)
        self._take = take

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module" and n.args and isinstance(n.args[0], Node):
            x = self.env[n.args[0]]
            if isinstance(x, torch.Tensor):
                self._take(n, x)
        return super().run_node(n)
