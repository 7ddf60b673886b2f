"""Models that are called in several forms: parts that hold for all of them are int8 for all."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.models import quantized, rows
from x86quant.errors import X86QuantWarning


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(F.relu(self.a(x)))


class Dispatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleDict({name: Branch() for name in ("p", "q")})

    def forward(self, x: torch.Tensor, name: str) -> Any:
        return self.branches[name](x)


class TakesLists(Branch):
    """Each of its tensors by itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def forward(self, items: Any) -> Any:
        return [super(TakesLists, self).forward(x) for x in items]


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return 0 < ((actual - expected).norm() / expected.norm()).item() < 0.06


def test_every_form_in_the_calibration_data_is_int8() -> None:
    model = Dispatches().eval()
    data = [(rows(16, seed=seed), "pq"[seed % 2]) for seed in range(4)]
    int8 = quantized(model, data)
    assert len(int8.quantization.int8_layers) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)
        for name in ("p", "q"):
            x = rows(5, seed=9)
            assert close(int8(x, name), model(x, name))


def test_lists_of_the_lengths_in_the_calibration_data_and_others_are_int8() -> None:
    model = TakesLists().eval()
    data = [([rows(4, seed=length + n) for n in range(length)],) for length in (3, 2)]
    int8 = quantized(model, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", X86QuantWarning)
        for length in (3, 1, 5):
            items = [rows(2, seed=9 + n) for n in range(length)]
            assert all(map(close, int8(items), model(items)))
