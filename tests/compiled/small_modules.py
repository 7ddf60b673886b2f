"""Small compiled models, and ways to change their weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.lowering.test_lowering import stock
from x86quant.compiled import CompiledModule

SHAPE = (2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.conv, self.middle, self.head = nn.Conv2d(3, 4, 3), middle, nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.middle(self.conv(x)))
        return result


def make(middle: nn.Module) -> CompiledModule:
    torch.manual_seed(0)
    x = torch.randn(SHAPE)
    return x86quant.compile(stock(Net(middle), x), (x,))


@pytest.fixture(scope="module")
def whole() -> CompiledModule:
    return make(nn.ReLU())


@pytest.fixture(scope="module")
def parted() -> CompiledModule:
    """A float op in the middle: two segments."""
    return make(nn.Softmax(1))


@pytest.fixture(params=["whole", "parted"])
def module(request: pytest.FixtureRequest) -> CompiledModule:
    built: CompiledModule = request.getfixturevalue(request.param)
    return copy.deepcopy(built)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def weight_of(module: CompiledModule) -> str:
    names = [n for n, b in module.graph_module.named_buffers() if b.dtype == torch.int8]
    return names[0]


def halved(module: CompiledModule) -> torch.Tensor:
    weight: torch.Tensor = getattr(module.graph_module, weight_of(module))
    return torch.div(weight, 2, rounding_mode="trunc").to(torch.int8)


def write(module: CompiledModule) -> None:
    getattr(module.graph_module, weight_of(module)).copy_(halved(module))


FLOAT_TYPES = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "to bfloat16": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "double": (lambda m: m.double(), torch.float64),
    "type": (lambda m: m.type(torch.float16), torch.float16),
    "there and back": (lambda m: m.half().float(), torch.float32),
    "kept by cpu": (lambda m: m.half().cpu(), torch.float16),
}


REFUSED = {
    "meta": (lambda m: m.to("meta"), "CPU only and cannot be moved to meta"),
    "emptied on meta": (lambda m: m.to_empty(device="meta"), "cannot be moved to meta"),
    "cuda": (lambda m: m.cuda(), "runs on the CPU only"),
    "integers": (lambda m: m.type(torch.int32), "use a floating type"),
    "complex": (lambda m: m.type(torch.complex64), "use a floating type"),
}


def saved(module: CompiledModule) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
