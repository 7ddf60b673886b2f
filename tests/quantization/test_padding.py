"""Margins of zeros, of the nearest pixel or mirrored ones are codes, however they are spelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

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
