"""Sums over a few branches are sums of these, in int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import x86quant

IMAGES = [torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(n)) for n in range(3)]


class Branches(nn.Module):
    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)
        self.both, self.fc = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(16, 32, 1)
        self.last = nn.Conv2d(16, 4, 3)
        self._between = (between,)
        self.eval()

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.mean((2, 3), keepdim=True)).view(x.shape[0], 2, 16, 1, 1).softmax(1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self._between[0](self, x))


def selective_kernels(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.stack([m.a(x).relu(), m.b(x).relu()], dim=1)
    torch._assert(x.shape[1] == 2, "")
    return torch.sum(x * m.weights(x.sum(1)), dim=1)


def split_attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.both(x).relu()
    batch, channels, height, width = x.shape
    x = x.reshape((batch, 2, channels // 2, height, width))
    return (x * m.weights(x.sum(dim=1))).sum(dim=1)


def plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack((m.a(x), m.b(x), m.a(x)), -1).sum(-1)


@pytest.mark.parametrize("between", [selective_kernels, split_attention, plain])
def test_branches_are_added_in_int8(between: Callable[..., Any]) -> None:
    model = Branches(between)
    found = x86quant.quantize(model, IMAGES, speed_check=False)
    assert isinstance(found, x86quant.CompiledModule)
    assert not {"sum", "stack"} & {node.op.partition(".")[0] for node in found.float_nodes}
    assert min(found.quantization.sqnr_db) > 28
    for x in (IMAGES[0][:1], torch.randn(3, 3, 20, 9)):
        with torch.no_grad():
            exact = model(x)
            assert float((found(x) - exact).norm() / exact.norm()) < 0.08


class Counting(nn.Module):
    """How many branches there are depends on the input."""

    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 3)
        self._between = (between,)
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self._between[0](self.conv(x)))


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.reshape(x.shape[0] // 2, 2, *x.shape[1:]).sum(1),
        lambda x: x.reshape(2, x.shape[0] // 2, *x.shape[1:]).sum(0),
        lambda x: x.unsqueeze(0).expand(2, *x.shape).sum(0),
        lambda x: torch.stack([x, x], 1).sum(2).repeat(1, 8, 1, 1),
        lambda x: torch.stack([x, x], 1).sum(1, keepdim=True)[:, 0],
        lambda x: torch.stack([x, x], 1).sum(dtype=torch.float64, dim=1).float(),
    ],
)
def test_other_sums_are_as_right_at_other_sizes(between: Callable[..., Any]) -> None:
    model = Counting(between)
    found = x86quant.quantize(model, IMAGES, speed_check=False)
    for x in (IMAGES[0], torch.randn(6, 3, 12, 12)):
        with torch.no_grad():
            exact = model(x)
            assert float((found(x) - exact).norm() / exact.norm()) < 0.08
