"""The observer of ops whose results lie in a range that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from x86quant.observing.observer import RangeObserver

#: A fixed range of which less than such a share is used is not taken: it leaves 5 bits of 8.
_LEAST_USED = 1 / 8


class FixedRangeObserver(RangeObserver):
    """The fixed range of an op such as sigmoid, unless what is seen leaves it or uses little.

    Stock preparation puts the observer of such an op on what comes before it, where only a
    slice, a chunk or another view stands between: a convolution's output then has the range of a
    sigmoid's, and loses every negative value. What leaves the fixed range is no result of the op,
    and gets the range that ``observer`` finds for it. So do results that use little of the range:
    probabilities of a thousand classes, say, which are all below one step.
    """

    def __init__(
        self, scale: float, zero_point: int, observer: Callable[[], nn.Module], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor([zero_point], dtype=torch.int32))
        self.observer = observer()

    scale: torch.Tensor
    zero_point: torch.Tensor

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """Observe ``x_orig`` and return it as it is."""
        # A masked score is minus infinity, which no range holds.
        self.observer(x_orig[torch.isfinite(x_orig)])
        return x_orig

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The fixed scale and zero point, or those that fit what was seen."""
        if self._fits():
            return self.scale, self.zero_point
        found: tuple[torch.Tensor, torch.Tensor] = self.observer.calculate_qparams()  # type: ignore[operator]
        return found

    def _fits(self) -> bool:
        """Whether no value seen is more than a step outside of the fixed range, and some use it."""
        low, high = (float(getattr(self.observer, name)) for name in ("min_val", "max_val"))
        if low > high or low == high == 0:  # nothing was seen, or nothing to tell a range by
            return True
        scale, zero_point = float(self.scale), int(self.zero_point)
        first = (int(self.quant_min) - 1 - zero_point) * scale
        last = (int(self.quant_max) + 1 - zero_point) * scale
        used = max(high / last, low / first if first < -scale else 0.0)
        return first <= low and high <= last and used >= _LEAST_USED
