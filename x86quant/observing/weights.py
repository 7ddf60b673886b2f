"""Observers of weights: symmetric ranges, one for each channel or one for all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from x86quant.observing.observer import RangeObserver

WeightObserverName = Literal["minmax", "mse"]

#: Symmetric about zero: the largest weight is represented exactly instead of being clipped, and
#: no kernel meets -128. The zero point is 0, the only one that oneDNN computes with.
LOWEST, HIGHEST = -127, 127
#: Weights are tried down to half their range: int8 never gains from clipping more.
_WEIGHT_SHARES = torch.linspace(1.0, 0.5, 26, dtype=torch.float32).tolist()


class ChannelRangesObserver(RangeObserver):
    """The least and largest weight of each channel; one range for all if ``ch_axis`` is None."""

    def __init__(self, ch_axis: int | None = 0, **kwargs: Any) -> None:
        kwargs.setdefault("quant_min", LOWEST)
        kwargs.setdefault("quant_max", HIGHEST)
        kwargs.setdefault("dtype", getattr(torch, "qint8", torch.int8))
        scheme = torch.per_tensor_symmetric if ch_axis is None else torch.per_channel_symmetric
        kwargs.setdefault("qscheme", scheme)
        super().__init__(**kwargs)
        self.ch_axis = ch_axis
        self.register_buffer("min_val", torch.tensor([], dtype=torch.float32))
        self.register_buffer("max_val", torch.tensor([], dtype=torch.float32))

    min_val: torch.Tensor
    max_val: torch.Tensor

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """Observe the weight ``x_orig``; what was seen before is forgotten."""
        rows = self.rows(x_orig)
        self.min_val, self.max_val = rows.amin(1), rows.amax(1)  # torch.aminmax takes twice as long
        return x_orig

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` as one row for each range."""
        values = weight.detach().to(torch.float32)
        if self.ch_axis is None:
            return values.reshape(1, -1)
        return values.transpose(0, self.ch_axis).flatten(1)

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points, one for each range."""
        return self.qparams(self.min_val, self.max_val)


class PerChannelMSEObserver(ChannelRangesObserver):
    """For symmetric weights: clips each channel where that makes its mean squared error smaller."""

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """Observe the weight ``x_orig``; what was seen before is forgotten."""
        super().forward(x_orig)
        rows = self.rows(x_orig)
        if not rows.numel():
            return x_orig
        largest = rows.abs().amax(1)
        steps = largest[:, None] / int(self.quant_max)
        least = torch.full_like(largest, math.inf)
        clip = largest.clone()
        for share in _WEIGHT_SHARES:
            step = (steps * share).clamp(min=torch.finfo(torch.float32).tiny)
            codes = (rows / step).round().clamp(int(self.quant_min), int(self.quant_max))
            error = (codes * step - rows).square().sum(1)
            better = error < least
            clip = torch.where(better, largest * share, clip)
            least = torch.where(better, error, least)
        self.min_val = torch.maximum(self.min_val, -clip)
        self.max_val = torch.minimum(self.max_val, clip)
        return x_orig


#: Weight observers by the name users give them.
CHANNEL_OBSERVERS: Mapping[str, type[ChannelRangesObserver]] = {
    "minmax": ChannelRangesObserver,
    "mse": PerChannelMSEObserver,
}
