"""A product with one, and a quotient by it, is no step: configurations have such factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.quantization.tracing.tracing import Way, by_export, by_fx, trace

IMAGES = [torch.randn(2, 8, 12, 12, generator=torch.Generator().manual_seed(n)) for n in range(3)]


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        return self.b(self.scale(x + torch.relu(self.b(x))))


@pytest.mark.parametrize("way", [by_fx, by_export])
@pytest.mark.parametrize(
    ("scale", "steps"),
    [
        (lambda x: x / 1.0, 0),
        (lambda x: x.div(1), 0),
        (lambda x: 1.0 * x, 0),
        (lambda x: x.mul(1.0) * 1, 0),
        (lambda x: x / 1.5, 1),
        (lambda x: 1.0 / (x + 2), 1),
    ],
)
def test_it_is_left_out(way: Way, scale: Callable[[torch.Tensor], Any], steps: int) -> None:
    model = Scaled(scale).eval()
    found = trace(model, Call((IMAGES[0],)), way).graph_module
    names = [str(getattr(node.target, "__name__", node.target)) for node in found.graph.nodes]
    scaled = [n for n in names if n.startswith(("mul", "div", "truediv", "reciprocal"))]
    assert len(scaled) == steps
    (result,) = found(IMAGES[0])
    assert torch.allclose(result, model(IMAGES[0]), atol=1e-6)


def test_integers_that_become_floats_by_it_are_right() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), n * 1.0

    model = Counted().eval()
    x, n = torch.randn(4, 8), torch.arange(4)
    found = x86quant.quantize(model, [(x, n), (x + 1, n)], speed_check=False, progress=False)
    assert found(x, n)[1].dtype == torch.float32
    assert torch.equal(found(x, n)[1], n * 1.0)


def test_results_are_tensors_of_their_own() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.linear(x) + x
            return y, y * 1.0, x / 1.0, (x * 1).view(-1)

    x = torch.randn(4, 8)
    found = x86quant.quantize(Copied().eval(), [x, x + 1], speed_check=False, progress=False)
    assert len({value.data_ptr() for value in (x, *found(x))}) == 5
