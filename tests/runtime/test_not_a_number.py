"""What static int8 makes of NaN and infinity: the ends of the range, as docs/numerics.md says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant


@torch.no_grad()
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("images", [1, 3])
def test_in_the_input_of_a_static_model(value: float, images: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 40)
    ).eval()
    x = torch.randn(4, 3, 17, 17)
    ours = x86quant.quantize(model, [x], mode="static", speed_check=False, progress=False)
    y = x[:images].clone()
    y[0, :, 3, 5:9] = value
    found = ours(y)
    assert bool(found.isfinite().all())
    assert torch.allclose(found, ours.graph_module(y), atol=1e-5)
    end = y.clone()
    low = -1e6 if value != float("inf") else 1e6
    end[0, :, 3, 5:9] = low
    assert torch.equal(found, ours(end))


@torch.no_grad()
def test_in_a_row_of_a_dynamic_model() -> None:
    ours, x = x86quant.to_dynamic(nn.Linear(16, 4).eval()), torch.randn(3, 16)
    x[1, 2] = float("nan")
    found = ours(x)
    assert bool(found[1].isnan().all())
    assert bool(found[[0, 2]].isfinite().all())
