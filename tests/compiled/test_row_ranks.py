"""Rows may stand in tensors of any rank where each is computed by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError, X86QuantWarning

SHAPES = [(64,), (3, 64), (2, 3, 64), (2, 1, 3, 64), (0, 64), (2, 0, 64)]


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)
    ).eval()


def int8(model: nn.Module, *shape: int) -> Any:
    return x86quant.quantize(model, [torch.randn(*shape) for _ in range(3)], speed_check=False)


@pytest.mark.parametrize("seen", [(8, 64), (4, 3, 64)])
@pytest.mark.parametrize("shape", SHAPES)
def test_linears_take_any_rank(seen: tuple[int, ...], shape: tuple[int, ...]) -> None:
    fast = int8(mlp(), *seen)
    assert isinstance(fast, CompiledModule)
    x = torch.randn(shape)
    found = fast(x)
    assert found.shape == (*shape[:-1], 10)
    assert torch.equal(found.flatten(), fast(x.reshape(*[1] * (len(seen) - 2), -1, 64)).flatten())


def test_so_do_exported_and_copied_ones() -> None:
    fast = int8(mlp(), 8, 64)
    x = torch.randn(2, 3, 64)
    assert torch.equal(copy.deepcopy(fast)(x), fast(x))
    assert torch.equal(torch.export.export(fast, (x,)).module()(x), fast(x))
    assert torch.equal(torch.compile(fast)(x), fast(x))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.at = nn.Parameter(torch.randn(8, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x) + self.at))


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        return self.last(y - y.mean(0, keepdim=True))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)).transpose(-1, -2))


@pytest.mark.parametrize("make", [Positions, Mean, Turned])
def test_no_other_rank_where_rows_depend_on_each_other(make: Callable[[], nn.Module]) -> None:
    fast = int8(make().eval(), 8, 64)
    assert isinstance(fast, CompiledModule)
    assert fast.row_rank is None
    with pytest.raises(InvalidInputError, match="must have rank 2"):
        fast(torch.randn(2, 8, 64))


def test_neither_do_images() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
    assert int8(model, 2, 3, 8, 8).row_rank is None


class TokensAndTheirMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.last = mlp(), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        tokens, whole = self.head(x), self.head(x.mean(1))
        return (
            self.last(tokens),
            self.last(whole),
            int((whole > 99).sum()),
        )  # so that it is no graph


def test_a_part_that_is_called_with_two_ranks_is_int8_in_both_and_saved(tmp_path: Path) -> None:
    model = TokensAndTheirMean().eval()
    fast = int8(model, 4, 6, 64)
    assert fast.head.outside == 0
    x = torch.randn(3, 5, 64)
    whole = fast(x)[1]
    assert fast.head.outside == 0
    assert not torch.equal(whole, model(x)[1])
    with pytest.warns(X86QuantWarning, match="but not its code"):
        x86quant.save(fast, tmp_path / "model.x86q")
    loaded = x86quant.load(tmp_path / "model.x86q", model=TokensAndTheirMean().eval())
    assert torch.equal(loaded(x)[1], whole)
