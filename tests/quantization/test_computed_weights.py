"""Weights that code computes of weights alone are constants, and layers around them layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import symbolic_trace

import x86quant
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.quantization.static import part_search
from x86quant.quantization.tracing.computed_weights import fold_constants
from x86quant.quantization.tracing.tracing import Way, by_export, by_fx


class Standardized(nn.Conv2d):
    """As networks without norms and big transfer have them: a weight of mean 0 and variance 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(
            rows, None, None, weight=self.gain.view(-1), training=True, momentum=0.0, eps=1e-6
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Padded(nn.Conv2d):
    """As networks from TensorFlow have them: the input is padded by code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (0, 1, 0, 1))
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


class PaddedByModule(nn.Conv2d):
    """The same, padded by a layer of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.padded = nn.ZeroPad2d((0, 1, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, sizes = self.padded(x), (self.stride, self.padding, self.dilation)
        return F.conv2d(x, self.weight, self.bias, *sizes, self.groups)


IMAGES = [torch.randn(2, 8, 12, 12, generator=torch.Generator().manual_seed(n)) for n in range(3)]


@pytest.mark.parametrize("way", [by_fx, by_export])
@pytest.mark.parametrize("kind", [Standardized, Padded, PaddedByModule])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_a_layer(
    kind: type[nn.Conv2d], groups: int, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_search, "WAYS", {"the way": way})
    torch.manual_seed(0)
    model = nn.Sequential(
        kind(8, 16, 3, groups=groups, stride=2), nn.BatchNorm2d(16), nn.ReLU(), kind(16, 4, 3)
    ).eval()
    model[1].running_mean.normal_(std=0.1)
    found = x86quant.quantize(model, IMAGES, speed_check=False)
    compiled = found if isinstance(found, x86quant.CompiledModule) else found.compiled
    assert not compiled.float_nodes
    ops = [op_name(node) for node in compiled.graph_module.graph.nodes if is_op(node)]
    assert [name for name in ops if name != "pad"] == ["quantize", "conv", "conv_real"]
    assert set(found.quantization.int8_layers) == {"0", "3"}
    assert min(found.quantization.sqnr_db) > 30
    kept = x86quant.quantize(model, IMAGES, speed_check=False, float_layers=["3"])
    assert set(kept.quantization.float_layers) == {"3"}


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Standardized(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.relu(self.conv(x)))


def test_one_that_is_called_twice_is_right() -> None:
    torch.manual_seed(0)
    found = x86quant.quantize(CalledTwice().eval(), IMAGES, speed_check=False)
    assert min(found.quantization.sqnr_db) > 30
    assert not found.float_nodes


class Positions(nn.Module):
    """A table of positions that a small network makes of coordinates."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.randn(12, 2))
        self.hidden, self.out = nn.Linear(2, 16), nn.Linear(16, 12)
        self.conv, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.out(F.relu(self.hidden(self.places)))
        return self.last(self.conv(x) + table.view(self.places.shape[0], -1))


def test_a_network_of_constants_is_computed_once() -> None:
    torch.manual_seed(0)
    model = Positions().eval()
    found = x86quant.quantize(model, IMAGES, speed_check=False)
    summary: Any = found.quantization
    assert {*summary.int8_layers} >= {"conv", "last"}
    assert not {"hidden", "out"} & {*summary.int8_layers}
    assert min(summary.sqnr_db) > 30


def traced(forward: Callable[..., Any]) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
            self.drop = nn.Dropout()

        def forward(self, x: torch.Tensor) -> Any:
            return forward(self, x)

    return symbolic_trace(Net())


@pytest.mark.parametrize(
    ("forward", "folded"),
    [
        (lambda m, x: x + m.weight.sin().sum(), 1),
        (lambda m, x: x.reshape(m.weight.shape[0], -1), 1),
        (lambda m, x: x.reshape(*[n * 2 for n in (m.weight.size(0),)], -1), 1),
        (lambda m, x: F.linear(x, m.weight), 0),
        (lambda m, x: x + torch.rand_like(m.weight).sum(), 0),
        (lambda m, x: x + F.dropout(m.weight).sum(), 0),
        (lambda m, x: x + m.drop(m.weight).sum(), 0),
        (lambda m, x: x + m.weight.new_empty(3).zero_().sum(), 0),
        (lambda m, x: (x, m.weight.sin()), 0),
    ],
)
def test_what_is_folded(forward: Callable[..., Any], folded: int) -> None:
    gm = traced(forward)
    x = torch.randn(12, 4)
    torch.manual_seed(0)
    expected = gm(x)
    assert fold_constants(gm) == folded
    torch.manual_seed(0)
    result = gm(x)
    for mine, its in zip([result], [expected], strict=True):
        torch.testing.assert_close(mine, its)
