"""Steps whose values no codes stand for: masks without bounds, several results at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.models import quantized, rows
from x86quant.errors import InvalidInputError
from x86quant.quantization.harm import sqnr_between

DATA = [rows(16, seed=seed) for seed in range(2)]


class Net(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.between(self.a(x)))


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return ((actual - expected).norm() / expected.norm()).item() < 0.06


def masked(lowest: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def between(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x).masked_fill(x < 0, lowest)
        return (x + mask).softmax(-1)

    return between


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min])
def test_masks_without_bounds_stay_in_float(lowest: float) -> None:
    model = Net(masked(lowest)).eval()
    int8 = quantized(model, DATA)
    assert int8.quantization.int8_layers == ("a", "b")
    for count in (16, 5, 1):
        assert close(int8(rows(count, seed=9)), model(rows(count, seed=9)))


def test_what_makes_nan_of_its_data_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        quantized(Net(lambda x: x + torch.log(x)).eval(), DATA)


def test_noise_is_that_of_values_with_bounds() -> None:
    exact = torch.tensor([float("-inf"), torch.finfo(torch.float32).max, 1.0, -1.0])
    masked = torch.tensor([torch.finfo(torch.float32).min, float("inf"), 1.1, -0.9])
    assert sqnr_between([exact], [masked]) == pytest.approx(20.0, abs=1e-3)
    shown = torch.tensor([0.0, float("inf"), 1.1, -0.9])
    assert sqnr_between([exact], [shown]) == -200.0


class Unpools(nn.Module):
    """Its pool is a module that returns where it found each value."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> Any:
        pooled, where = self.pool(F.relu(self.a(x)))
        return self.b(pooled), where


@pytest.mark.parametrize("pool", [nn.MaxPool2d, nn.AdaptiveMaxPool2d])
def test_pools_that_give_indices(pool: Any) -> None:
    model = Unpools(pool(2, return_indices=True)).eval()
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    int8 = quantized(model, [images])
    assert int8.quantization.int8_layers == ("a", "b")
    assert close(int8(images)[0], model(images)[0])
    assert int8(images)[1].dtype is torch.int64
