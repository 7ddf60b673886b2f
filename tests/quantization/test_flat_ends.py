"""Codes in front of an activation are spent where it is not flat."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import symbolic_trace

import x86quant
from tests.models import sqnr
from x86quant.quantization.static import observation
from x86quant.quantization.static.flat_ends import useful_range


class Activated(nn.Module):
    """An activation between two convolutions; what it reads is far from zero."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)
        self.a.weight.data *= 20
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.function(self.a(x)))


def spelled(x: torch.Tensor) -> torch.Tensor:
    return x * F.relu6(x + 3) / 6


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (F.hardswish, -3.0, math.inf),
        (nn.Hardswish(), -3.0, math.inf),
        (spelled, -3.0, math.inf),
        (F.hardsigmoid, -3.0, 3.0),
        (torch.tanh, -4.2, 4.2),
        (nn.Sigmoid(), -8.3, 8.3),
    ],
)
def test_where_activations_are_flat(
    function: Callable[[torch.Tensor], torch.Tensor], low: float, high: float
) -> None:
    found: list[Any] = []
    real = observation.useful_range

    def kept(*args: Any) -> Any:
        found.append(real(*args))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observation, "useful_range", kept)
        model = Activated(function).eval()
        batches = [torch.randn(4, 3, 20, 20) for _ in range(3)]
        x86quant.quantize(model, batches, progress=False, speed_check=False)
    assert found
    assert found[0][0] == pytest.approx(low, abs=0.05)
    assert found[0][1] == pytest.approx(high, abs=0.05)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.leaky_relu(x, 0.01),
        lambda x: F.leaky_relu(x, 1e-6),
        torch.sin,
        torch.abs,
        lambda x: x * 0 + 1,
        lambda x: torch.log(x),
    ],
)
def test_what_is_flat_nowhere(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gm = symbolic_trace(Plain(function))
    source, *steps, _ = gm.graph.nodes
    assert useful_range(source, set(steps), steps[-1], {}) is None


class Plain(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("observer", ["mse", "minmax", "percentile"])
@pytest.mark.parametrize("function", [F.hardswish, spelled, torch.tanh])
def test_it_gains_accuracy(
    function: Callable[[torch.Tensor], torch.Tensor],
    observer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Activated(function).eval()
    batches = [torch.randn(4, 3, 20, 20) for _ in range(3)]
    x = torch.randn(8, 3, 20, 20)

    def noise() -> float:
        options: dict[str, Any] = {"observer": observer, "progress": False, "speed_check": False}
        return sqnr(model(x), x86quant.quantize(model, batches, **options)(x))

    with_ends = noise()
    monkeypatch.setattr(observation, "useful_range", lambda *_: None)
    assert with_ends > noise() + 0.3
