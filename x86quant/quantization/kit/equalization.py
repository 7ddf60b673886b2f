"""Cross-layer equalization: channels of one activation are brought to like ranges.

Between two layers that only scale-commuting ops (ReLU, pools, ...) separate, channel ``c`` can be
divided by ``s[c]`` in the first layer's weight and bias and multiplied again in the second's
weight: the function stays the same. One scale serves all channels of an int8 activation, so a
channel much narrower than the widest one loses its bits, unless it is widened first.

A clamp from 0 to a limit, such as ReLU6, commutes where it cuts nothing off: channels that reached
the limit in calibration stay as they are, others are widened at most so far that what was seen, and
some more, stays below it. What lies beyond is cut off, as beyond the end of any range.

The first layer's weight has a scale a channel, so it loses nothing. What is weighed is the
activation against the second layer's weight: ``s = a^alpha / w^(1 - alpha)``, with the ``alpha``
for which the estimated noise of the second layer's output is least, or nothing at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_AVERAGES: frozenset[Any] = frozenset({
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
})  # fmt: skip
_COMMUTING: frozenset[Any] = _AVERAGES | {
    nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    F.relu, F.leaky_relu, F.max_pool1d, F.max_pool2d, F.max_pool3d,
    torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
}  # fmt: skip
_ALPHAS = (0.25, 0.5, 0.75, 1.0)
#: Scales beyond this help no more: such a channel is as good as dead.
_LARGEST_SCALE = 2.0**12
#: By how much values that were seen stay below a clamp's limit: others may be larger.
_ROOM = 2.0
#: How far a channel is widened in front of a clamp at most: what calibration hardly showed of a
#: channel says little about its range.
_LEAST = 1 / 16
#: Below this share of the noise it is worth the change: the estimate is a rough one.
_WORTH = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Equalized:
    """One pair of layers of a part and what each channel in between was divided by."""

    part: str
    first: str
    second: str
    scales: torch.Tensor
    noise: float

    def __str__(self) -> str:
        spread = float(self.scales.max() / self.scales.min())
        return (
            f"{self.first} -> {self.second}: channels rescaled up to {spread:.3g} times, "
            f"estimated noise × {self.noise:.3g}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two layers, by path, with only scale-commuting ops between.

    Attributes:
        first, second: the layers.
        node: that of the second.
        limit: what a clamp between them cuts off.
    """

    first: str
    second: str
    node: Node
    limit: float = math.inf


class ChannelRanges:
    """Per-channel statistics of the inputs of second layers, over some batches."""

    def __init__(self, gm: GraphModule) -> None:
        self.module = gm
        self.pairs = tuple(find_pairs(gm))
        self.largest: dict[Pair, torch.Tensor] = {}
        self.squares: dict[Pair, torch.Tensor] = {}

    @contextlib.contextmanager
    def watching(self, gm: GraphModule) -> Iterator[None]:
        """A block in which runs of ``gm`` are measured: the graph, or it with observers."""
        with contextlib.ExitStack() as stack:
            for pair in self.pairs:

                def watch(_: nn.Module, args: tuple[Any, ...], pair: Pair = pair) -> None:
                    self._add(pair, args[0].detach())

                handle = gm.get_submodule(pair.second).register_forward_pre_hook(watch)
                stack.callback(handle.remove)
            yield

    def _add(self, pair: Pair, x: torch.Tensor) -> None:
        channels = _width(self.module.get_submodule(pair.first))
        if isinstance(self.module.get_submodule(pair.second), _CONVS):
            dims = len(self.module.get_submodule(pair.second).kernel_size)  # type: ignore[arg-type]
            rows = x.reshape(-1, channels, math.prod(x.shape[-dims:]))
        else:  # columns of a linear, a few a channel if a flatten stands before it
            rows = x.reshape(-1, channels, x.shape[-1] // channels)
        # torch's norm of extremes, and aminmax, take 15 times as long.
        largest = torch.maximum(rows.amax((0, 2)), -rows.amin((0, 2)))
        squares = torch.linalg.vector_norm(rows, dim=2).double().square().sum(0)
        squares /= rows.shape[0] * rows.shape[2]
        if pair in self.largest:
            largest = torch.maximum(largest, self.largest[pair])
            squares = torch.maximum(squares, self.squares[pair])
        self.largest[pair], self.squares[pair] = largest, squares


def find_pairs(gm: GraphModule) -> Iterator[Pair]:
    """Every pair of layers in ``gm`` that can be equalized, in order."""
    modules = dict(gm.named_modules(remove_duplicate=False))
    calls: dict[int, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            key = id(modules[str(node.target)])
            calls[key] = calls.get(key, 0) + 1
    for node in gm.graph.nodes:
        if node.op != "call_module" or not _is_layer(modules[str(node.target)]):
            continue
        second, limit = _follow(node, modules)
        if second is None:
            continue
        a, b = modules[str(node.target)], modules[str(second.target)]
        if calls[id(a)] == calls[id(b)] == 1 and a is not b and _fits(a, b):
            yield Pair(str(node.target), str(second.target), second, limit)


def _is_layer(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, *_CONVS)


def _follow(node: Node, modules: dict[str, nn.Module]) -> tuple[Node | None, float]:
    """The layer that alone reads ``node``, through scale-commuting ops, and a clamp's limit."""
    flattened, limit = False, math.inf
    while len(node.users) == 1:
        (user,) = node.users
        if not user.args or user.args[0] is not node:
            break
        module = modules.get(str(user.target)) if user.op == "call_module" else None
        if module is not None and _is_layer(module):
            fits = not flattened or isinstance(module, nn.Linear)
            return (user if fits else None), limit
        kind = type(module) if module is not None else user.target
        if _flattens(user):
            flattened = True
        elif kind in (nn.ReLU6, F.relu6):
            limit = 6.0
        elif kind not in _COMMUTING or (limit < math.inf and kind in _AVERAGES):
            break  # behind an average nobody sees whether a clamp has cut something off
        node = user
    return None, limit


def _flattens(node: Node) -> bool:
    """Whether ``node`` flattens all dimensions after the first."""
    if node.target is not torch.flatten:
        return False
    dims = (*node.args[1:], *node.kwargs.values())
    return dims in ((1,), (1, -1))


def _fits(first: nn.Module, second: Any) -> bool:
    """Whether the second layer's input channels are the first's outputs."""
    width = _width(first)
    if isinstance(second, nn.Linear):
        exact = isinstance(first, nn.Linear)
        return second.in_features == width if exact else second.in_features % width == 0
    return not isinstance(first, nn.Linear) and bool(second.in_channels == width)


def _width(layer: nn.Module) -> int:
    """Output channels."""
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)  # type: ignore[arg-type]


def worthwhile(
    ranges: ChannelRanges, part: str = "", *, always: bool = False
) -> tuple[Equalized, ...]:
    """The pairs of a graph with scales that lower the estimated noise.

    What one pair changes of a weight that another reads does not matter for that one: of the first
    layer it is the rows, of the second the columns.

    Args:
        ranges: what was seen at the pairs of a traced float model whose batch norms are folded.
        part: where in the model it stands.
        always: take scales however little is gained.
    """
    found = []
    for pair in ranges.pairs:
        if pair not in ranges.largest:
            continue
        largest, squares = ranges.largest[pair].double(), ranges.squares[pair]
        columns = _columns(ranges.module.get_submodule(pair.second), len(largest))
        best = _best_scales(largest, squares, columns, pair.limit, 1.0 if always else _WORTH)
        if best is not None:
            scales, noise = best
            found.append(Equalized(part, pair.first, pair.second, scales.float(), noise))
    return tuple(found)


def apply(gm: GraphModule, pair: Equalized) -> None:
    """Rescale one pair of layers of ``gm``, in place."""
    first: Any = gm.get_submodule(pair.first)
    second = gm.get_submodule(pair.second)
    with torch.no_grad():
        weight = first.weight
        weight /= pair.scales.view(-1, *(1,) * (weight.dim() - 1))
        if first.bias is not None:
            first.bias /= pair.scales
        columns = _columns(second, len(pair.scales))
        columns *= _by_column(pair.scales, columns)


def _columns(layer: Any, channels: int) -> torch.Tensor:
    """The layer's weight as a view [groups, outputs, channels in the group, positions]."""
    weight: torch.Tensor = layer.weight.detach()
    if isinstance(layer, nn.Linear):
        return weight.view(1, layer.out_features, channels, -1)
    groups: int = layer.groups
    return weight.view(groups, weight.shape[0] // groups, channels // groups, -1)


def _by_column(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """One value a channel, to go with ``columns``."""
    return values.view(columns.shape[0], 1, columns.shape[2], 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Weight:
    """What noise depends on of a weight [groups, outputs, channels in the group, positions].

    Attributes:
        largest: the largest of its absolute values at all positions, [groups, outputs, channels].
        squares: the sum of the squares of all outputs and positions, [groups, channels].
        positions: how many there are.
    """

    largest: torch.Tensor
    squares: torch.Tensor
    positions: int

    @staticmethod
    def of(columns: torch.Tensor) -> _Weight:
        squares = columns.double().square_().sum((1, 3))
        return _Weight(columns.abs().amax(3).double(), squares, columns.shape[3])


def _best_scales(
    largest: torch.Tensor,
    squares: torch.Tensor,
    columns: torch.Tensor,
    limit: float,
    worth: float,
) -> tuple[torch.Tensor, float] | None:
    """Scales [C] and the share of noise left with them, or None if they are not worth it."""
    weight = _Weight.of(columns)
    width = weight.largest.amax(1).flatten()
    live = (largest > 0) & (width > 0)
    before = _noise(largest, squares, weight, torch.ones_like(largest))
    if int(live.sum()) < 2 or before == 0:
        return None
    best, least = None, before * worth
    for alpha in _ALPHAS:
        log = alpha * largest.clamp(min=1e-30).log() - (1 - alpha) * width.clamp(min=1e-30).log()
        scales = _with_dead((log - log[live].mean()).exp(), largest, width, live)
        if limit < math.inf:  # the widest channel stays as it is
            scales = scales / scales[live].amax()
            scales = torch.maximum(scales, largest * _ROOM / limit).clamp(_LEAST, 1.0)
        scales = scales.clamp(1 / _LARGEST_SCALE, _LARGEST_SCALE)
        noise = _noise(largest, squares, weight, scales)
        if noise < least:
            best, least = scales, noise
    return None if best is None else (best, least / before)


def _with_dead(
    scales: torch.Tensor, largest: torch.Tensor, width: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """``scales`` of the live channels; others must not set the step of the weight or activation."""
    narrowest = (width * scales)[live].min()
    lowest = (largest / scales)[live].min()
    silent = narrowest / width.clamp(min=1e-30)
    unread = largest / lowest
    dead = torch.where(width > 0, silent, torch.where(largest > 0, unread, 1.0))
    return torch.where(live, scales, dead)


def _noise(
    largest: torch.Tensor, squares: torch.Tensor, weight: _Weight, scales: torch.Tensor
) -> float:
    """Mean squared error of the second layer's output, in units of a twelfth.

    The activation has one step for all channels; the weight has one for each output.
    """
    grouped = scales.view(weight.squares.shape)
    step = (largest / scales).amax() / 255
    from_activation = step.square() * (weight.squares * grouped.square()).sum()
    weight_steps = (weight.largest * grouped[:, None]).amax(2) / 127
    energy = (squares / scales.square()).view(grouped.shape).sum(1)
    from_weight = (weight_steps.square().sum(1) * energy).sum() * weight.positions
    return float(from_activation + from_weight)
