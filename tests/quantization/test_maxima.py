"""Maxima over whole dimensions, however they are spelled: one pool of codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.lowering.graph_tools import is_op, op_name

WORDS, IMAGES = (2, 6, 20), (2, 6, 9, 11)


class Net(nn.Module):
    """A maximum between two layers."""

    def __init__(self, dims: int, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before = (nn.Conv1d, nn.Conv2d)[dims - 1](6, 8, 3)
        self.behind = nn.Linear(8, 5)
        self.largest = largest
        self.pool = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)[dims - 1](1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Five numbers for each."""
        x = F.relu(self.before(x))
        y = self.pool(x) if self.largest is nn.Identity else self.largest(x)
        return self.behind(y.flatten(1))


def unpacked(x: torch.Tensor) -> torch.Tensor:
    """The values of a pair."""
    values, _ = torch.max(x, 2)
    return values


SPELLINGS: dict[str, tuple[tuple[int, ...], Any]] = {
    "max(dim)[0]": (WORDS, lambda x: x.max(2)[0]),
    "torch.max(dim=)": (WORDS, lambda x: torch.max(x, dim=-1, keepdim=True)[0]),
    "max().values": (WORDS, lambda x: torch.max(x, 2).values),
    "unpacked": (WORDS, unpacked),
    "amax": (IMAGES, lambda x: x.amax((2, 3))),
    "torch.amax": (IMAGES, lambda x: torch.amax(x, dim=[-1, -2], keepdim=True)),
    "adaptive, a layer": (IMAGES, nn.Identity),
    "adaptive, a layer of words": (WORDS, nn.Identity),
    "adaptive": (IMAGES, lambda x: F.adaptive_max_pool2d(x, (1, 1))),
    "a pool of its size": (WORDS, lambda x: F.max_pool1d(x, x.size(2))),
    "a pool of its shape": (WORDS, lambda x: F.max_pool1d(x, x.shape[-1]).squeeze(2)),
    "a pool of both sizes": (IMAGES, lambda x: F.max_pool2d(x, (x.shape[2], x.shape[3]))),
    "a pool of all sizes": (IMAGES, lambda x: F.max_pool2d(x, x.size()[2:])),
    "flattened": (IMAGES, lambda x: x.flatten(2).max(2)[0]),
}


def quantized(model: nn.Module, shape: tuple[int, ...]) -> x86quant.CompiledModule:
    """An int8 model, and nothing in between in float."""
    batches = [torch.randn(*shape) for _ in range(8)]
    module = x86quant.quantize(model, batches, speed_check=False, progress=False)
    assert isinstance(module, x86quant.CompiledModule)
    return module


def ops(module: x86quant.CompiledModule) -> list[str]:
    """What the graph calls of ours."""
    return [op_name(node) for node in module.graph_module.graph.nodes if is_op(node)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_a_pool_of_codes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape, largest = SPELLINGS[name]
    model = Net(len(shape) - 2, largest).eval()
    module = quantized(model, shape)
    assert "adaptive_max_pool" in ops(module)
    assert ops(module).count("quantize") == 1
    assert not module.float_nodes
    x86quant.save(module, tmp_path / "net.x86q")
    loaded = x86quant.load(tmp_path / "net.x86q")
    for x in (torch.randn(*shape), torch.randn(3, *(size + 4 for size in shape[1:2]), *shape[2:])):
        if x.shape[1] != shape[1]:
            x = torch.randn(3, shape[1], *(size + 4 for size in shape[2:]))
        want, got = model(x), module(x)
        assert (want - got).abs().max() <= 0.05 * want.abs().max()
        assert torch.equal(got, loaded(x))


def test_a_maximum_along_one_side_alone(tmp_path: Path) -> None:
    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(6, 8, 1), nn.Conv1d(8, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.a(x)).max(dim=-1, keepdim=False)[0])

    torch.manual_seed(0)
    model = Edges().eval()
    module = quantized(model, IMAGES)
    assert "adaptive_max_pool" in ops(module)
    assert ops(module).count("quantize") == 1
    x = torch.randn(1, 6, 30, 4)
    want = model(x)
    assert (want - module(x)).abs().max() <= 0.05 * want.abs().max()


def test_what_also_asks_where_the_maximum_is_stays(tmp_path: Path) -> None:
    class Where(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv1d(6, 8, 1), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, places = torch.max(self.a(x), 2)
            return self.b(values), places

    torch.manual_seed(0)
    model = Where().eval()
    module = quantized(model, WORDS)
    x = torch.randn(*WORDS)
    want, got = model(x), module(x)
    assert got[1].dtype is torch.int64
    assert (want[0] - got[0]).abs().max() <= 0.05 * want[0].abs().max()
