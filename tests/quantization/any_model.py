"""Small models, and what ``quantize`` makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant

Forward = Callable[[Any, torch.Tensor], Any]


def images(count: int = 8, size: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def quantized(model: nn.Module, data: Any, **settings: Any) -> Any:
    return x86quant.quantize(model, data, **{"progress": False, **settings})


def sqnr(exact: torch.Tensor, actual: torch.Tensor) -> float:
    assert exact.shape == actual.shape
    exact, actual = exact.detach().double(), actual.detach().double()
    noise = (exact - actual).norm()
    return float("inf") if noise == 0 else float(20 * torch.log10(exact.norm() / noise))


class Net(nn.Module):
    """Two convolutions with something in between."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("mem", torch.zeros(8, 1, 1))
        self._between = (between,)
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self._between[0](self, self.a(x)))


def clamp(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.clamp_(-0.1, 0.1)
    return x


class Branches(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if x.shape[2] > 20:
            y = F.max_pool2d(y, 2)
        if x.shape[0] > 1:
            y = y * 0.5
        return self.b(y)


class Recurrent(nn.Module):
    """Convolutions, then a recurrent layer, then a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.rnn = kind(8, 16, batch_first=True)
        self.head = nn.Linear(16, 5)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.conv(x)).transpose(1, 2)
        return self.head(self.rnn(y)[0])
