"""Networks of values far below one, such as heads of detectors before they are trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant
from x86quant.observing.observer import RangeObserver

QSCHEMES = [torch.per_tensor_affine, torch.per_tensor_symmetric]


def network(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=bias),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, bias=bias),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3, groups=32, bias=bias),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10, bias=bias),
    ).eval()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1e-7, 1e-9, 1e-12])
def test_small_values_are_as_exact_as_others(size: float, bias: bool) -> None:
    model = network(bias)
    data = [(size * torch.randn(4, 3, 24, 24),) for _ in range(4)]
    int8 = x86quant.quantize(model, data[:3], speed_check=False, effort="fast")
    with torch.no_grad():
        want, got = model(*data[3]), int8(*data[3])
    noise = (got - want).double().norm() / want.double().norm()
    assert not int8.quantization.float_layers
    assert noise < 10 ** (-30 / 20)


@pytest.mark.parametrize("qscheme", QSCHEMES)
def test_zeros_have_a_scale_that_loses_no_value_that_counts(qscheme: torch.qscheme) -> None:
    observer = RangeObserver(qscheme=qscheme)
    scale, _ = observer.qparams(torch.tensor([0.0, -1e-12]), torch.tensor([0.0, 1e-12]))
    assert scale[0] == torch.finfo(torch.float32).eps
    assert 0 < scale[1] < 1e-13
