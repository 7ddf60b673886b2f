"""Models of classes of the user's own, and how a test loads what was saved."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.artifacts.reader import from_bytes
from x86quant.artifacts.writer import to_bytes
from x86quant.errors import X86QuantWarning


def loaded_from(data: bytes, model: nn.Module | None = None) -> Any:
    return from_bytes(data)[1].build(model)


@dataclasses.dataclass
class Answer:
    out: torch.Tensor


class Classy(nn.Module):
    """It branches on values, so no graph does what it does."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.arange(float(width)), persistent=False)

    def forward(self, ids: torch.Tensor) -> Answer:
        x = self.inner(self.embed(ids) + self.shift)
        if x.sum() > 1e6:
            x = x * 0.5
        return Answer(F.linear(x, self.embed.weight) + self.head(x))


def classy() -> tuple[nn.Module, torch.Tensor, bytes]:
    torch.manual_seed(0)
    model, ids = Classy().eval(), torch.randint(0, 20, (2, 5))
    quantized = x86quant.quantize(model, None, mode="dynamic", progress=False, speed_check=False)
    with pytest.warns(X86QuantWarning, match=r"load\(path, model=Classy"):
        data = to_bytes(quantized, (ids,))
    return quantized, ids, data


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Objects(nn.Module):
    """Returns objects of classes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Pair:
        y = self.linear(x)
        return Pair(y, Answer(y + 1))  # type: ignore[arg-type]


class Way(enum.Enum):
    ONE = 1
    OTHER = 2


class ByWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, way: Way = Way.ONE) -> torch.Tensor:
        y = self.a(x)
        return self.b(torch.relu(y) if way is Way.ONE else y.tanh() - 1)
