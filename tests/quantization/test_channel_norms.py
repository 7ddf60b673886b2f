"""Norms over channels that come before pixels are layer norms, however they are spelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.calling.call import Call
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.quantization.static import part_search
from x86quant.quantization.tracing.tracing import Way, by_export, by_fx, trace


def of_convnext(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-6)
    return w[:, None, None] * x + b[:, None, None]


def of_restorers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mu, var = x.mean(dim=1, keepdim=True), torch.var(x, dim=1, unbiased=False, keepdim=True)
    return (x - mu) / (var + 1e-6).sqrt() * w.view(1, -1, 1, 1) + b.view(1, -1, 1, 1)


def by_rsqrt(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    centred = x - torch.mean(x, (1,), True)
    y = torch.rsqrt((centred * centred).mean(1, True) + 1e-6) * centred
    return b.view(-1, 1, 1) + y * w.view(-1, 1, 1)


def of_an_unbiased_variance(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-6).sqrt()
    return y * w.view(-1, 1, 1) + b.view(-1, 1, 1)


def with_the_epsilon_outside(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    deviation = x.var(1, unbiased=False, keepdim=True).sqrt() + 1e-2
    return (x - x.mean(1, keepdim=True)) / deviation * w.view(-1, 1, 1) + b.view(-1, 1, 1)


def over_rows(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = (x - x.mean(2, keepdim=True)) / (x.var(2, unbiased=False, keepdim=True) + 1e-6).sqrt()
    return y * w.view(-1, 1, 1) + b.view(-1, 1, 1)


def of_another_mean(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = (x - x.relu().mean(1, keepdim=True)) / (
        x.var(1, unbiased=False, keepdim=True) + 1e-6
    ).sqrt()
    return y * w.view(-1, 1, 1) + b.view(-1, 1, 1)


class Normed(nn.Module):
    def __init__(self, norm: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1)
        self.weight, self.bias = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x), self.weight, self.bias))


def images(rows: int = 2, size: int = 12) -> torch.Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("way", [by_fx, by_export])
@pytest.mark.parametrize("norm", [of_convnext, of_restorers, by_rsqrt])
def test_it_is_a_layer_norm_on_codes(
    norm: Callable[..., torch.Tensor], way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_search, "WAYS", {"the way": way})
    model = Normed(norm).eval()
    data = [images(), images(3), images(4)]
    found = x86quant.quantize(model, data, speed_check=False, progress=False)
    compiled: Any = found if isinstance(found, x86quant.CompiledModule) else found.compiled
    ops = [op_name(node) for node in compiled.graph_module.graph.nodes if is_op(node)]
    assert [name for name in ops if name != "permute"] == [
        "quantize",
        "conv",
        "layer_norm",
        "conv_real",
    ]
    assert not compiled.float_nodes
    for x in (images(), images(1), images(3, 15)):
        exact = model(x)
        assert (found(x) - exact).square().mean() < 0.01 * exact.square().mean()


@pytest.mark.parametrize("way", [by_fx, by_export])
@pytest.mark.parametrize(
    "norm", [of_an_unbiased_variance, with_the_epsilon_outside, over_rows, of_another_mean]
)
def test_what_only_looks_like_one_stays(norm: Callable[..., torch.Tensor], way: Way) -> None:
    model = Normed(norm).eval()
    graph = trace(model, Call((images(),)), way).graph_module
    assert F.layer_norm not in {node.target for node in graph.graph.nodes}
    assert torch.allclose(graph(images())[0], model(images()), atol=1e-5)
