"""Sums of a layer's output channels, from sums of what its weights are given.

A convolution or linear is affine: the sum of each channel is the product of each weight with the
sum of all that it meets, and that takes a small part of the layer's own time. It is looked at once,
and is right for whatever weights the layer has later.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

#: The sum of each channel, and of how many values it is.
Sums = tuple[torch.Tensor, int]

#: So many samples are added as they lie.
_FEW = 64
_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Given:
    """What a layer was given in all, inputs of any sizes."""

    def __init__(self) -> None:
        self._sums: dict[torch.Size, Sums] = {}

    def add(self, layer: nn.Module, x: torch.Tensor) -> None:
        """``layer`` was given ``x``."""
        if x.numel():
            met, count = _met(layer, x)
            before, counted = self._sums.get(met.shape, (0.0, 0))
            self._sums[met.shape] = before + met, counted + count

    def sums(self, layer: nn.Module) -> Sums:
        """The sums of the output channels that ``layer`` makes of it: one of the same geometry."""
        total, values = torch.zeros((), dtype=torch.float64), 0
        for met, counted in self._sums.values():
            found, count = _of_channels(layer, met, counted)
            total, values = total + found, values + count
        return total, values


def channel_sums(layer: nn.Module, x: torch.Tensor) -> Sums:
    """The sum of each output channel of ``layer`` on ``x``, and of how many values it is."""
    given = Given()
    given.add(layer, x)
    return given.sums(layer)


def _met(layer: nn.Module, x: torch.Tensor) -> Sums:
    """The sum of what each weight meets, and how often; of others the sum of all samples."""
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])
        return rows.sum(0).double(), len(rows)
    dims = len(layer.kernel_size)  # type: ignore[arg-type]
    maps = x.reshape(-1, *x.shape[-dims - 1 :])
    if _is_plain(layer):
        return _met_by_taps(layer, maps)
    return _over_samples(maps), len(maps)


def _of_channels(layer: Any, met: torch.Tensor, count: int) -> Sums:
    weight = layer.weight.detach()
    if isinstance(layer, nn.Linear) or _is_plain(layer):
        groups = getattr(layer, "groups", 1)
        grouped = weight.double().reshape(groups, -1, weight[0].numel())
        total = (grouped @ met.reshape(groups, -1, 1)).flatten()
        more = count
    else:
        values = layer.forward(met[None])[0].flatten(1)
        total, more = values.double().sum(1), values.shape[1] * (count - 1)
        count *= values.shape[1]
    return (total if layer.bias is None else total + layer.bias.detach().double() * more), count


def _met_by_taps(layer: Any, maps: torch.Tensor) -> Sums:
    geometry = list(
        zip(layer.kernel_size, layer.stride, layer.padding, layer.dilation, strict=True)
    )
    if all(one == (1, 1, 0, 1) for one in geometry):  # each value is met once
        spatial = tuple(range(2, maps.dim()))
        return maps.sum(spatial).double().sum(0), len(maps) * math.prod(maps.shape[2:])
    # [channels, *spatial], then one dimension after another becomes that of its taps.
    sums, outputs = _over_samples(maps), len(maps)
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
        sums = torch.stack(met, dim).double()  # of one line of values float32 holds enough
    return sums, outputs


def _over_samples(maps: torch.Tensor) -> torch.Tensor:
    """The sum of all samples."""
    if len(maps) > _FEW:
        return maps.sum(0)
    total = maps[0].clone()  # one after the other, where they lie: torch goes from one to the next
    for other in maps[1:]:
        total += other
    return total


def _is_plain(layer: Any) -> bool:
    """Whether ``layer`` is a convolution with zeros around its input, if anything."""
    plain = type(layer) in _PLAIN and "forward" not in vars(layer)
    return plain and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
