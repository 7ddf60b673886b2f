"""What a float model reads of itself is part of its graph, and setting it later is warned about."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.models import quantized, rows
from x86quant.errors import X86QuantWarning

DATA = [rows(16, seed=seed) for seed in range(2)]


class Net(nn.Module):
    negative = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.factor = 1.0
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.b(F.relu(self.a(x))) * self.factor / self.temperature
        return -y if self.negative else y


class Named(Net):
    """A guard stands before its graph."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": super().forward(x), "n": None}


class Around(nn.Module):
    """Only a part of it is a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) if x.sum().item() < 1e9 else x


@pytest.mark.parametrize("kind", [Net, Named, Around])
@pytest.mark.parametrize("name", ["negative", "factor", "temperature", "a"])
def test_setting_what_the_float_model_reads_is_warned_about(kind: Any, name: str) -> None:
    int8 = quantized(kind(), DATA)
    for one in (int8, copy.deepcopy(int8)):
        replaced = one if kind is not Around else one.inner
        with pytest.warns(X86QuantWarning, match=f"setting {name} has no effect"):
            setattr(replaced, name, 3)


def test_what_is_the_users_own_may_be_set() -> None:
    int8 = quantized(Net(), DATA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        int8.label = "mine"
        int8.eval()
        int8.half()
    assert int8.label == "mine"
