"""Models that artifacts are tested with."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from tests.stock import engine
from x86quant.compiled import CompiledModule, compile


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
