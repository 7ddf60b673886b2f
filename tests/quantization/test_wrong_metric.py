"""What is no metric is refused before any work is done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant


def test_a_metric_by_name() -> None:
    with pytest.raises(x86quant.InvalidInputError, match="metric must be a function"):
        x86quant.quantize(nn.Linear(4, 4), [torch.randn(2, 4)], metric="accuracy")  # type: ignore[arg-type]
