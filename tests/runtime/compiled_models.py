"""Models compiled for tests of the runtime, and their plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant
from tests.lowering.test_lowering import stock
from x86quant import extension
from x86quant.compiled import CompiledModule
from x86quant.runtime import Plan


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The extension, which tests use that nothing before them has loaded."""
    extension.load()


def compiled(model: nn.Module, *shape: int) -> CompiledModule:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return x86quant.compile(stock(model, x), (x,))


def plan_of(module: CompiledModule) -> Plan:
    (segment,) = module.segments
    return segment.plans[-1]
