"""Contexts in which the float model computes something else are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant


def test_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    message = "under torch.autocast, where the float model computes in torch.bfloat16"
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(x86quant.InvalidInputError, match=message),
    ):
        x86quant.quantize(model, [torch.randn(4, 16)])
