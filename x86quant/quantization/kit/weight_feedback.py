"""Int8 weights that make up for each other's rounding, by what a layer is given (GPTQ).

Tap after tap of a weight is rounded, and what that changes in the results is taken off the taps
that are still to come. Scales stay as they are. A layer is given the float model's inputs, rounded
as they will be; of their windows as many as are needed to tell which taps go together. Recurrent
layers have weights for the input and, at every step but the first, for the states before.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Node

from x86quant.lowering.rounded import Int8Weight, RoundedLayer
from x86quant.quantization.kit.simulation import fake_activation
from x86quant.quantization.static.conversion import product_names
from x86quant.quantization.static.static_part import Rounded, StaticPart
from x86quant.quantization.tracing.recurrent_layers import is_recurrent_layer, returns_last

#: What is added to the squares of all taps, as a share of their mean: windows are few.
_DAMPING = 0.01
#: Taps of a layer, beyond which it takes too long.
_MOST_TAPS = 1152
#: Of how many windows of a call: of few where there are few taps.
_LEAST_WINDOWS, _WINDOWS = 256, 1024
#: All calls together show as many as so many calls.
_CALLS = 4
#: So many taps are rounded before those behind them are told, by one product.
_AT_ONCE = 64
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and by weight the sums of products of what its taps meet, [groups, taps, taps]."""

    node: Node
    module: Any
    squares: dict[str, torch.Tensor]


class WeightFeedback:
    """Chooses codes for the weights of a calibrated part over some batches."""

    def __init__(self, part: StaticPart, calls_shown: int) -> None:
        calls = Counter(n.target for n in part.prepared.graph.nodes if n.op == "call_module")
        self._part = part
        self._layers: dict[str, _Layer] = {}
        for node in (layer.node for layer in part.layers):
            module: Any = part.module(node)
            taps = _taps(module)
            if taps and calls[node.target] == 1 and max(taps.values()) <= _MOST_TAPS:
                groups = getattr(module, "groups", 1)
                squares = {
                    name: torch.zeros(groups, count, count, dtype=torch.float32)
                    for name, count in taps.items()
                }
                self._layers[node.name] = _Layer(node, module, squares)
        self._share = min(1.0, _CALLS / max(calls_shown, 1))

    def rounded(self) -> dict[nn.Module, Rounded]:
        """Each layer with the codes chosen for it; without those that were given infinities."""
        found: dict[nn.Module, Rounded] = {}
        for one in self._layers.values():
            if not all(bool(torch.isfinite(x).all()) for x in one.squares.values()):
                continue
            if is_recurrent_layer(one.module):
                weights, biases = self._part.rounded_products(one.node, one.module)
                names = [f"weight_{name}" for name in product_names(one.module)]
                found[one.module] = (
                    [_with_feedback(one, *each) for each in zip(names, weights, strict=True)],
                    biases,
                )
            else:
                plain = self._part.rounded_layer(one.node, one.module)
                weight = _with_feedback(one, "weight", plain.weight)
                found[one.module] = RoundedLayer(one.module, weight, one.module.bias)
        return found

    def take(self, node: Node, given: Sequence[Any], result: Any) -> None:
        """Look at what the layer of ``node`` is given in float."""
        layer = self._layers.get(node.name)
        if layer is None or not given[0].numel():
            return
        part = self._part
        observer = part.observer_of(layer.node.args[0])

        def seen(x: torch.Tensor) -> torch.Tensor:
            return x if observer is None else fake_activation(observer, x)

        if is_recurrent_layer(layer.module):
            states = result[0] if returns_last(layer.module) else result
            states = fake_activation(part.output_observer(layer.node), states)
            before = given[1] if len(given) > 1 else None
            x = seen(given[0])
            met = _met_by_recurrent(layer.module, x, states, before, share=self._share)
        else:  # zeros around it stay zeros: only what is looked at has to be rounded
            met = {"weight": seen(_windows(layer.module, given[0], self._share))}
        for name, squares in layer.squares.items():
            squares.baddbmm_(met[name].transpose(1, 2), met[name])


def _with_feedback(layer: _Layer, name: str, plain: Int8Weight) -> Int8Weight:
    """The weight called ``name`` with the codes chosen for it; those of ``plain`` if none are."""
    if name not in layer.squares:
        return plain
    weight = getattr(layer.module, name).detach()
    return Int8Weight(_codes(weight, plain, layer.squares[name]), plain.scales, plain.axis)


def _taps(layer: Any) -> dict[str, int]:
    """By the name of a weight of ``layer``, how many values make one result."""
    if is_recurrent_layer(layer):
        # What projections are given no result tells.
        names = [f"weight_{x}" for x in product_names(layer) if not x.startswith("hr")]
        return {name: getattr(layer, name).shape[1] for name in names}
    return {"weight": int(layer.weight[0].numel())} if type(layer) in _KINDS else {}


def _met_by_recurrent(
    layer: Any,
    x: torch.Tensor,
    states: torch.Tensor,
    before: torch.Tensor | None = None,
    *,
    share: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Some of what each weight meets, [1, rows, taps]: ``x``, and the ``states`` at other steps.

    The first step meets the states ``before``, [directions, ..., width], where these are no zeros.
    """
    steps = 1 if layer.batch_first and x.dim() == 3 else 0
    directions = states.chunk(2 if layer.bidirectional else 1, -1)
    found = {}
    for number, own in enumerate(directions):
        suffix = "_l0_reverse" if number else "_l0"
        others = own.narrow(steps, 0 if number == 0 else 1, own.shape[steps] - 1)
        rows = others.reshape(-1, own.shape[-1])
        if before is not None:
            rows = torch.cat([before[number].reshape(-1, own.shape[-1]), rows])
        found[f"weight_ih{suffix}"] = _rows(x, share)
        found[f"weight_hh{suffix}"] = _rows(rows, share)
    return found


def _rows(x: torch.Tensor, share: float) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows[_some(len(rows), rows.shape[-1], share)].unsqueeze(0)


def _windows(layer: Any, x: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """Some of what the weight of ``layer`` meets in ``x``, [groups, windows, taps]."""
    if isinstance(layer, nn.Linear):
        return _rows(x, share)
    dims = layer.weight.dim() - 2
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    maps = x.reshape(-1, *x.shape[-dims - 1 :])
    around = layer._reversed_padding_repeated_twice
    padded = (F.pad(maps, around, mode) if any(around) else maps).movedim(1, -1)
    geometry = list(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True))
    counts = [
        (size - dilation * (taps - 1) - 1) // stride + 1
        for size, (taps, stride, dilation) in zip(padded.shape[1:-1], geometry, strict=True)
    ]
    some = _some(len(padded) * math.prod(counts), layer.weight[0].numel(), share)
    image, *places = torch.unravel_index(some, (len(padded), *counts))
    index = [image.view(-1, *[1] * dims)]
    for dim, (place, (taps, stride, dilation)) in enumerate(zip(places, geometry, strict=True)):
        along = place[:, None] * stride + torch.arange(taps) * dilation
        index.append(along.view(-1, *(taps if d == dim else 1 for d in range(dims))))
    found = padded[tuple(index)].movedim(-1, 1)
    return found.reshape(len(found), layer.groups, -1).transpose(0, 1)


def _some(count: int, taps: int, share: float) -> torch.Tensor:
    """The numbers of some of ``count`` windows: as many tell how their ``taps`` go together."""
    most = int(min(max(_LEAST_WINDOWS, 2 * taps), _WINDOWS) * share)
    if count <= most:
        return torch.arange(count)
    return torch.randint(count, (most,), generator=torch.Generator().manual_seed(0))


def _codes(weight: torch.Tensor, plain: Int8Weight, squares: torch.Tensor) -> torch.Tensor:
    """Codes of ``weight`` at the scales of ``plain``, given what its taps meet."""
    groups, taps, _ = squares.shape
    left = weight.reshape(groups, -1, taps).transpose(1, 2).clone()  # a row for each tap
    scales = plain.scales.float().expand(len(weight)).reshape(groups, -1)
    steps = scales.clamp(min=torch.finfo(torch.float32).tiny)
    spread = _spread(squares)
    codes = torch.empty_like(left)
    for first in range(0, taps, _AT_ONCE):
        last = min(first + _AT_ONCE, taps)
        block = left[:, first:last].contiguous()
        changes = torch.empty_like(block)
        own = spread[:, first:last, first:last]  # zeros for the taps before: those stay
        # Taken apart here: a view takes as long as what is computed with it.
        for now, code, change, itself, those_behind, of_all in zip(
            block.unbind(1),
            codes[:, first:last].unbind(1),
            changes.unbind(1),
            own.diagonal(dim1=1, dim2=2).unsqueeze(2).unbind(1),
            own.unsqueeze(3).unbind(1),
            changes.unsqueeze(2).unbind(1),
            strict=True,
        ):
            torch.div(now, steps, out=code).round_().clamp_(-127, 127)
            torch.addcmul(now, code, steps, value=-1, out=change).div_(itself)
            block.baddbmm_(those_behind, of_all, alpha=-1)
        left[:, last:].baddbmm_(spread[:, first:last, last:].transpose(1, 2), changes, alpha=-1)
    return codes.transpose(1, 2).reshape(weight.shape).to(torch.int8)


def _spread(squares: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of each of ``squares``: who makes up for whom."""
    damped = squares.double()
    mean = damped.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    damped.diagonal(dim1=1, dim2=2).add_(_DAMPING * mean.where(mean > 0, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
