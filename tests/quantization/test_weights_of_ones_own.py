"""Modules of the user's that multiply by weights of their own, and hold no layers of torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.quantization.any_model import sqnr


class OwnLinear(nn.Module):
    """As libraries of graph networks have it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Shift(nn.Module):
    """Weights that are added, or scale."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.shift[0]) + self.shift[1]


class Sums(nn.Module):
    """Of the rows that edges lead to; cannot be traced."""

    def __call__(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])


class GraphNetwork(nn.Module):
    """Two rounds of a product and a sum over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OwnLinear(32, 64), OwnLinear(64, 10)
        self.shift, self.sums = Shift(64), Sums()

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.sums(self.shift(self.first(x)), edges))
        return self.sums(self.second(y), edges)


@pytest.mark.parametrize("rows", [50, 80])
def test_products_of_a_graph_network_are_int8(rows: int) -> None:
    torch.manual_seed(0)
    model = GraphNetwork().eval()
    edges = torch.randint(0, 50, (2, 300))
    batches = [(torch.randn(50, 32), edges) for _ in range(4)]
    result = x86quant.quantize(model, batches, speed_check=False, progress=False)
    assert sorted(result.quantization.traced_by) == ["first", "second"]
    # What scales and shifts alone is no part.
    assert "static parts: first, second; torch runs" in str(result.quantization)
    x = torch.randn(rows, 32)
    x86quant.assert_int8(result, (x, edges))
    assert sqnr(model(x, edges), result(x, edges)) > 25
