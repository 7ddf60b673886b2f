"""Models that artifacts are tested with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from tests.stock_tensors import engine
from x86quant.compiled import CompiledModule, compile
from x86quant.quantization import quantize


class Mixed(nn.Module):
    """Int8 layers of several kinds, a float layer between them, and arithmetic on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.group_norm = nn.GroupNorm(2, 8)
        self.recurrent = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = F.hardswish(self.norm(self.depthwise(x)) + x)
        x = self.group_norm(F.max_pool2d(x, 2))
        n, c, h, w = x.shape
        x = x.reshape(n, c, h * w).transpose(1, 2)
        return self.head(self.recurrent(x)[0].mean(1))


def stock(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """``model`` converted by the stock workflow, calibrated on ``x``."""
    with engine("onednn"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stock PyTorch warns of its own default observers
        prepared = prepare_fx(model.eval(), get_default_qconfig_mapping("x86"), (x,))
        prepared(x)
        return convert_fx(prepared)


def mixed() -> tuple[CompiledModule, torch.Tensor]:
    """The compiled ``Mixed`` and an input for it."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    return compile(stock(Mixed(), x), (x,)), x


class BySize(nn.Module):
    """A branch on a size, within attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.shape[1] > 8:
            x = x[:, ::2]
        x = self.layer(x)
        return {"out": self.head(x), "mean": x.mean(1)}


class ByValue(nn.Module):
    """A branch on values between a recurrent layer, convolutions and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.convs = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.recurrent(x)[0]
        if bool(y.sum() > 0):
            y = y * 0.5
        return self.head(self.convs(y.transpose(1, 2)).mean(2))


class Scaled(nn.Module):
    """A number among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor, scales: tuple[float, ...] = (1.0,)) -> torch.Tensor:
        if x.shape[0] > 4:
            x = x * 0.5
        return self.head(torch.relu(self.conv(x) * scales[0]))


def _quantized(model: nn.Module, x: torch.Tensor, dynamic: bool = False) -> nn.Module:
    torch.manual_seed(0)
    mode: Any = "dynamic" if dynamic else "auto"
    return quantize(model.eval(), [x, x], mode=mode, speed_check=False, progress=False)


#: For each form: a quantized model, an input, and what ``load`` is given as ``model``.
FORMS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, nn.Module | None]]] = {
    "exported": lambda: (_quantized(BySize(), x := torch.randn(3, 6, 16), True), x, None),
    "class": lambda: (_quantized(ByValue(), x := torch.randn(3, 6, 8)), x, ByValue()),
    "guarded": lambda: (_quantized(Scaled(), x := torch.randn(3, 3, 8, 8)), x, Scaled()),
}
