"""Code that asks ``len`` of a tensor is traced with a free size."""

from __future__ import annotations

import builtins
import sys

import pytest
import torch
from torch import nn

import x86quant
from x86quant.compiled.module import CompiledModule


class _Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(self.convs) == 2
        for conv in self.convs:
            x = conv(x)
        return x.permute(0, 2, 3, 1).reshape(len(x), -1, 4).softmax(-1)


@pytest.mark.parametrize("rows", [1, 4])
def test_the_whole_is_one_graph_for_any_number_of_rows(rows: int) -> None:
    torch.manual_seed(0)
    model, x = _Flat().eval(), torch.randn(rows, 3, 10, 10)
    made = x86quant.quantize(model, [(x,)], progress=False, speed_check=False)
    assert isinstance(made, CompiledModule)
    for count in (1, 2, 5):
        other = torch.randn(count, 3, 10, 10)
        with torch.no_grad():
            assert (made(other) - model(other)).abs().max() < 0.05


def test_names_are_as_before() -> None:
    module = sys.modules[__name__]
    x86quant.quantize(_Flat().eval(), [torch.randn(2, 3, 10, 10)], progress=False)
    assert "len" not in vars(module)
    assert builtins.len([1]) == 1


class _OwnLength(_Flat):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        return found


def test_a_files_own_len_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(value: object) -> int:
        return builtins.len(value)  # type: ignore[arg-type]

    monkeypatch.setitem(globals(), "len", own)
    made = x86quant.quantize(_OwnLength().eval(), [torch.randn(2, 3, 10, 10)], progress=False)
    assert made(torch.randn(2, 3, 10, 10)).shape == (2, 36, 4)
    assert globals()["len"] is own
