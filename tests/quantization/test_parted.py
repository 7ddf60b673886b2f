"""Tensors that are parted between int8 steps: their codes are parted, whoever traces the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.lowering.graph_tools import is_op, op_name

Parting = Callable[[torch.Tensor], list[torch.Tensor]]


class Block(nn.Module):
    """What detectors have: some channels pass by the layers that the others go through."""

    def __init__(self, part: Parting, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before = nn.Conv2d(4, 16, 1)
        self.inside = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.behind = nn.Conv2d(32, 8, 1)
        self.part, self.act = part, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Codes from end to end."""
        y = self.part(self.act(self.before(x)))
        y.extend(self.act(layer(y[-1])) for layer in self.inside)
        return self.behind(torch.cat(y, 1))


def unpacked(x: torch.Tensor) -> list[torch.Tensor]:
    """By two names."""
    a, b = x.chunk(2, 1)
    return [a, b]


def indexed(x: torch.Tensor) -> list[torch.Tensor]:
    """By numbers."""
    both = torch.split(x, 8, dim=1)
    return [both[0], both[1]]


def by_name(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensor by its name, too."""
    both = torch.chunk(input=x, chunks=2, dim=1)
    return [both[0], both[1]]


PARTINGS: dict[str, Parting] = {
    "a list of sizes": lambda x: list(x.split((8, 8), 1)),
    "a list of chunks": lambda x: list(x.chunk(2, 1)),
    "unpacked": unpacked,
    "indexed": indexed,
}


@pytest.mark.parametrize("act", [F.silu, F.relu], ids=["silu", "relu"])
@pytest.mark.parametrize("name", PARTINGS)
def test_codes_are_parted(name: str, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = Block(PARTINGS[name], act).eval()
    batches = [torch.randn(2, 4, 12, 12) for _ in range(4)]
    module = x86quant.quantize(model, batches, speed_check=False, progress=False)
    (graph,) = (m for m in module.modules() if isinstance(m, x86quant.CompiledModule))
    assert not graph.float_nodes
    ops = [op_name(node) for node in graph.graph_module.graph.nodes if is_op(node)]
    assert ops.count("quantize") == 1
    assert "lut" not in ops
    assert "dequantize" not in ops
    for x in (torch.randn(2, 4, 12, 12), torch.randn(1, 4, 9, 15)):
        want, got = model(x), module(x)
        assert (want - got).square().mean() < 0.01 * want.square().mean()


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_what_export_traces_is_upsampled_in_codes(mode: str) -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = list(F.silu(self.a(x)).split(8, 1))  # which torch.fx cannot follow
            return self.b(F.interpolate(parts[0], scale_factor=2, mode=mode))

    torch.manual_seed(0)
    model = Up().eval()
    batches = [torch.randn(2, 4, 8, 8) for _ in range(4)]
    module = x86quant.quantize(model, batches, speed_check=False, progress=False)
    (graph,) = (m for m in module.modules() if isinstance(m, x86quant.CompiledModule))
    assert not graph.float_nodes
    assert "upsample" in [op_name(n) for n in graph.graph_module.graph.nodes if is_op(n)]
    x = torch.randn(1, 4, 8, 8)
    want = model(x)
    assert (want - module(x)).square().mean() < 0.01 * want.square().mean()


def test_a_tensor_given_by_name_may_be_parted() -> None:
    torch.manual_seed(0)
    model = Block(by_name, F.silu).eval()
    batches = [torch.randn(2, 4, 12, 12) for _ in range(4)]
    module = x86quant.quantize(model, batches, speed_check=False, progress=False)
    want = model(batches[0])
    assert (want - module(batches[0])).square().mean() < 0.01 * want.square().mean()
