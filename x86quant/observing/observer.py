"""What every observer is: a module that watches values and chooses a scale and zero point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from x86quant.errors import InvalidInputError

#: Said by an observer that has nothing to choose a range by.
NO_DATA = "an observer saw no data: run calibration batches through the prepared model"

#: What is larger stands for infinity, as finfo.min does in masks: no range is to hold it.
LARGEST = 1e30

_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
#: The product of two such scales is still a normal number of float32.
_LEAST_SCALE = 2.0**-60
#: That of values that all are 0: of others that come later, it loses none that count.
_SCALE_OF_ZEROS = torch.finfo(torch.float32).eps


def scale_of(widths: torch.Tensor, levels: float) -> torch.Tensor:
    """The scales by which ranges of ``widths`` have ``levels`` steps."""
    scale = (widths / levels).clamp(min=_LEAST_SCALE)
    return torch.where(widths > 0, scale, _SCALE_OF_ZEROS)


def named(table: Mapping[str, Any], argument: str, name: str) -> Any:
    """The observer called ``name`` in ``table``.

    Raises:
        InvalidInputError: there is none; the message says whose ``argument`` that is.
    """
    if name not in table:
        raise InvalidInputError(f"{argument} must be one of {', '.join(table)}, not {name!r}")
    return table[name]


class RangeObserver(nn.Module):
    """Chooses a range from the values it is shown.

    Its attributes carry the names that stock PyTorch reads off its own observers.

    Args:
        dtype: of the codes, as stock PyTorch calls it; unsigned 8 bits.
        qscheme: affine or symmetric, per tensor or per channel.
        quant_min: the lowest code; the type's own if None.
        quant_max: the highest code.
        is_dynamic: for stock PyTorch alone.

    Attributes:
        stretch: what the range that is chosen is multiplied by.
    """

    stretch = 1.0

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__()
        self.dtype = getattr(torch, "quint8", torch.uint8) if dtype is None else dtype
        self.qscheme, self.is_dynamic = qscheme, is_dynamic
        signed = str(self.dtype) in ("torch.qint8", "torch.int8")
        low, high = (-128, 127) if signed else (0, 255)
        self.quant_min = low if quant_min is None else quant_min
        self.quant_max = high if quant_max is None else quant_max

    @classmethod
    def with_args(cls, **kwargs: Any) -> Any:
        """What builds such observers, for a ``QConfig`` of stock PyTorch."""
        from torch.ao.quantization.observer import _with_args

        return _with_args(cls, **kwargs)  # type: ignore[no-untyped-call]

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point of the chosen range."""
        raise NotImplementedError

    def qparams(self, lows: torch.Tensor, highs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points of ranges, each widened to hold 0."""
        lows, highs = self.stretch * lows.clamp(max=0), self.stretch * highs.clamp(min=0)
        levels = float(self.quant_max - self.quant_min)
        if self.qscheme in _SYMMETRIC:
            scale = scale_of(torch.maximum(-lows, highs), levels / 2)
            middle = (self.quant_min + self.quant_max + 1) // 2
            return scale, torch.full_like(scale, middle, dtype=torch.int64)
        scale = scale_of(highs - lows, levels)
        zero_point = self.quant_min - torch.round(lows / scale).to(torch.int64)
        return scale, zero_point.clamp(self.quant_min, self.quant_max)
