"""Margins of zeros, of the nearest pixel or mirrored ones are codes, however they are spelled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils import _pytree as pytree

import x86quant
from tests.models import sqnr
from x86quant.lowering.graph_tools import is_op

Pad = Callable[[torch.Tensor], torch.Tensor]


class Between(nn.Module):
    """Margins between two convolutions."""

    def __init__(self, pad: Pad, dims: int = 2) -> None:
        super().__init__()
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.last, self.pad = kind(3, 16, 3), kind(16, 16, 3), pad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.pad(self.first(x).relu()))


def quantized(model: nn.Module, dims: int = 2) -> Any:
    data = [torch.randn(2, 3, *[12] * dims) for _ in range(3)]
    return x86quant.quantize(model, data, speed_check=False, progress=False)


def graph_of(ours: Any) -> Any:
    """The graph of what holds for all sizes, or for some."""
    return getattr(ours, "compiled", ours).graph_module


def as_written(ours: Any, x: torch.Tensor) -> torch.Tensor:
    """The result of a graph's ops one by one."""
    (found,) = pytree.tree_leaves(graph_of(ours)(x))
    return found


PADS: dict[str, tuple[Pad, int]] = {
    "zeros": (lambda x: F.pad(x, (1, 0, 2, 3)), 2),
    "some dimensions": (lambda x: F.pad(x, (2, 0)), 2),
    "cut": (lambda x: F.pad(x, (1, -1)), 2),
    "reflect": (lambda x: F.pad(x, (1, 0, 2, 3), mode="reflect"), 2),
    "causal": (lambda x: F.pad(x, (4, 0)), 1),
    "ZeroPad2d": (nn.ZeroPad2d(1), 2),
    "ReflectionPad1d": (nn.ReflectionPad1d((3, 1)), 1),
    "ReflectionPad2d": (nn.ReflectionPad2d(2), 2),
    "ReplicationPad2d": (nn.ReplicationPad2d((1, 2, 3, 4)), 2),
    "ReplicationPad3d": (nn.ReplicationPad3d(1), 3),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PADS)
def test_margins_are_codes(name: str) -> None:
    torch.manual_seed(0)
    pad, dims = PADS[name]
    model = Between(pad, dims).eval()
    ours = quantized(model, dims)
    assert not [n for n in ours.float_nodes if n.op != "pad"]
    for size in (9, 14):
        x = torch.randn(3, 3, *[size] * (dims - 1), size + 1)
        found = ours(x)
        torch.testing.assert_close(found, ours.graph_module(x))
        assert sqnr(model(x), found) > 30


@torch.no_grad()
@pytest.mark.parametrize(
    "pad", [lambda x: F.pad(x, (1, 1), value=2.0), nn.ConstantPad2d(1, 3.0), nn.CircularPad2d(1)]
)
def test_other_margins_are_float(pad: Pad) -> None:
    torch.manual_seed(0)
    model = Between(pad).eval()
    ours = quantized(model)
    assert [n.name for n in ours.float_nodes]
    x = torch.randn(2, 3, 9, 9)
    assert sqnr(model(x), ours(x)) > 30


def _even(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Margins that make a length of 4 n + 2, as causal networks of audio have them."""
    length = x.shape[-1]
    extra = (math.ceil((length - 2) / 4 + 1) - 1) * 4 + 2 - length
    return F.pad(x, (1, extra), mode)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["reflect", "constant"])
def test_margins_by_sizes_are_codes(mode: str) -> None:
    torch.manual_seed(0)
    model = Between(lambda x: _even(x, mode), 1).eval()
    ours = quantized(model, 1)
    assert not [n for n in ours.float_nodes if n.op != "pad"]
    for size in (12, 13, 14, 15, 40):
        x = torch.randn(2, 3, size)
        found = ours(x)
        torch.testing.assert_close(found, as_written(ours, x))
        assert sqnr(model(x), found) > 30


class Joined(nn.Module):
    """As U-Nets are whose way up ends in other sizes than the way down had."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, stride=2)
        self.up, self.last = nn.ConvTranspose2d(16, 16, 3, stride=2), nn.Conv2d(32, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        z = self.up(self.down(y).relu())
        high, wide = y.size(2) - z.size(2), y.size(3) - z.size(3) - 2
        z = F.pad(z, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
        return self.last(torch.cat([y[..., 1:-1], z], 1))


@torch.no_grad()
def test_margins_by_differences_of_sizes_are_codes_and_cut() -> None:
    torch.manual_seed(0)
    model = Joined().eval()
    ours = quantized(model)
    assert [n for n in graph_of(ours).graph.nodes if is_op(n, "pad")]
    assert not [n for n in ours.float_nodes if n.op == "pad"]
    for sizes in ((12, 12), (13, 12), (12, 15), (21, 18)):
        x = torch.randn(2, 3, *sizes)
        found = ours(x)
        torch.testing.assert_close(found, as_written(ours, x))
        assert sqnr(model(x), found) > 30


def test_margins_wider_than_what_they_mirror_are_refused() -> None:
    ours = quantized(Between(nn.ReflectionPad2d(4)).eval())
    with pytest.raises((RuntimeError, ValueError)):
        ours(torch.randn(1, 3, 6, 6))


@torch.no_grad()
def test_sums_between_margins_are_codes() -> None:
    """A causal network: what a clamped sum gives is read by margins, and by the next sum."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv1d(8, 8, 3, dilation=2**n) for n in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for n, layer in enumerate(self.layers):
                x = F.relu(x + F.relu(layer(F.pad(x, (2 * 2**n, 0)))))
            return x

    torch.manual_seed(0)
    model = Causal().eval()
    data = [torch.randn(2, 8, 32) for _ in range(3)]
    ours = x86quant.quantize(model, data, speed_check=False, progress=False)
    assert not ours.float_nodes
    assert len([n for n in ours.graph_module.graph.nodes if is_op(n, "pad")]) == 3
    assert sqnr(model(data[0]), ours(data[0])) > 30
