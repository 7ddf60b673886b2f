"""Norms over channels that come before pixels are torch's own, however they are spelled."""

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
from x86quant.quantization.tracing import channel_norms
from x86quant.quantization.tracing.seen_values import seen_values
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


def with_the_weight_first(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return w.view(1, -1, 1, 1) * (x - mean) / (variance + 1e-6).sqrt() + b.view(1, -1, 1, 1)


def over_all(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dims = (1, 2, 3)
    mean = x.mean(dims, keepdim=True)
    variance = ((x - mean) ** 2).mean(dims, keepdim=True)
    return w.view(1, -1, 1, 1) * (x - mean) / torch.sqrt(variance + 1e-8) + b.view(1, -1, 1, 1)


def over_all_by_rsqrt(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x - x.mean((1, 2, 3), True)
    y = y * torch.rsqrt(x.var((1, 2, 3), unbiased=False, keepdim=True) + 1e-5)
    return y * w.view(-1, 1, 1) + b.view(-1, 1, 1)


def with_channels_last(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x - x.mean((1, 2, 3), keepdim=True)
    y = y / torch.sqrt(x.var((1, 2, 3), unbiased=False, keepdim=True) + 1e-8)
    return (w * y.transpose(1, -1) + b).transpose(1, -1)


def over_channels_that_go_last(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = (x - x.mean(1, True)) / torch.sqrt(x.var(1, unbiased=False, keepdim=True) + 1e-8)
    return (y.transpose(-1, 1) * w + b).transpose(1, -1)


def over_some_that_go_last(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x - x.mean((1, 2), True)
    y = y * torch.rsqrt(x.var((1, 2), unbiased=False, keepdim=True) + 1e-5)
    return (y.transpose(1, -1) * w + b).transpose(1, -1)


def with_one_weight_for_all(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return with_channels_last(x, w[:1], b[:1])


def with_channels_that_stay_last(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = (x - x.mean(1, True)) / torch.sqrt(x.var(1, unbiased=False, keepdim=True) + 1e-8)
    return (y.transpose(1, -1) * w + b).transpose(1, 2).permute(0, 3, 1, 2)


def over_some(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x - x.mean((1, 2), True)
    y = y * torch.rsqrt(x.var((1, 2), unbiased=False, keepdim=True) + 1e-5)
    return y * w.view(-1, 1, 1) + b.view(-1, 1, 1)


def over_two_kinds(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x - x.mean((1, 2, 3), True)
    y = y * torch.rsqrt(x.var(1, unbiased=False, keepdim=True) + 1e-5)
    return y * w.view(-1, 1, 1) + b.view(-1, 1, 1)


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
@pytest.mark.parametrize(
    ("norm", "op"),
    [
        (of_convnext, "layer_norm"),
        (of_restorers, "layer_norm"),
        (by_rsqrt, "layer_norm"),
        (with_the_weight_first, "layer_norm"),
        (over_all, "group_norm"),
        (over_all_by_rsqrt, "group_norm"),
        (with_channels_last, "group_norm"),
        (over_channels_that_go_last, "layer_norm"),
    ],
)
def test_it_is_a_norm_on_codes(
    norm: Callable[..., torch.Tensor], op: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_search, "WAYS", {"the way": way})
    model = Normed(norm).eval()
    data = [images(), images(3), images(4)]
    found = x86quant.quantize(model, data, speed_check=False, progress=False)
    compiled: Any = found if isinstance(found, x86quant.CompiledModule) else found.compiled
    ops = [op_name(node) for node in compiled.graph_module.graph.nodes if is_op(node)]
    assert [name for name in ops if name not in ("permute", "transpose")] == [
        "quantize",
        "conv",
        op,
        "conv_real",
    ]
    assert not compiled.float_nodes
    for x in (images(), images(1), images(3, 15)):
        exact = model(x)
        assert (found(x) - exact).square().mean() < 0.01 * exact.square().mean()


@pytest.mark.parametrize("way", [by_fx, by_export])
@pytest.mark.parametrize(
    "norm",
    [
        of_an_unbiased_variance, with_the_epsilon_outside, over_rows, of_another_mean, over_some,
        over_two_kinds, over_some_that_go_last, with_channels_that_stay_last,
        with_one_weight_for_all,
    ],
)  # fmt: skip
def test_what_only_looks_like_one_stays(norm: Callable[..., torch.Tensor], way: Way) -> None:
    model = Normed(norm).eval()
    graph = trace(model, Call((images(),)), way).graph_module
    assert not {F.layer_norm, F.group_norm} & {node.target for node in graph.graph.nodes}
    assert torch.allclose(graph(images())[0], model(images()), atol=1e-5)


def test_many_norms_are_asked_for_their_ranks_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def watched(gm: Any, inputs: Any, wanted: Any) -> Any:
        asked.append(len(wanted))
        return seen_values(gm, inputs, wanted)

    def twice(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return with_channels_last(with_channels_last(x, w, b), w, b)

    monkeypatch.setattr(channel_norms, "seen_values", watched)
    model = Normed(twice).eval()
    graph = trace(model, Call((images(),))).graph_module
    assert asked == [2]
    assert sum(node.target is F.group_norm for node in graph.graph.nodes) == 2
    assert torch.allclose(graph(images())[0], model(images()), atol=1e-5)
