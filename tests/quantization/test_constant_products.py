"""Products with constant matrices become int8 as linears do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.models import quantized, rows
from x86quant.quantization.static import part_search
from x86quant.quantization.tracing.tracing import Way, by_export, by_fx

DATA = [rows(16, seed=seed) for seed in range(2)]


class Products(nn.Module):
    """Has matrices, and no layers."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(16, 16, generator=generator) / 4)
        self.register_buffer("c", torch.randn(16, generator=generator))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(F.relu(x), self.w, self.c)


FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "@": lambda x, w, c: x @ w,
    "@ T": lambda x, w, c: x @ w.T,
    "@ transpose": lambda x, w, c: x @ w.transpose(0, 1),
    "matmul": lambda x, w, c: x.matmul(w.mT),
    "mm": lambda x, w, c: torch.mm(x, w.t()),
    "addmm": lambda x, w, c: torch.addmm(c, x, w),
}


@pytest.mark.parametrize("way", [by_fx, by_export])
@pytest.mark.parametrize("form", FORMS)
def test_products_with_constant_matrices_become_int8(
    form: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_search, "WAYS", {"the way": way})
    model = Products(FORMS[form]).eval()
    int8 = quantized(model, DATA)
    assert len(int8.quantization.int8_layers) == 1
    for count in (16, 1, 5):
        actual, expected = int8(rows(count, seed=9)), model(rows(count, seed=9))
        assert ((actual - expected).norm() / expected.norm()).item() < 0.06


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, c: w @ x[:16].t(),  # the matrix comes first
        lambda x, w, c: x @ (w * x[0]),  # it is computed
        lambda x, w, c: torch.addmm(c, x, w, beta=0.5),
    ],
)
def test_other_products_are_right(function: Callable[..., torch.Tensor]) -> None:
    class Behind(Products):
        def __init__(self) -> None:
            super().__init__(function)
            torch.manual_seed(0)
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(self.layer(x))

    model = Behind().eval()
    int8 = quantized(model, DATA)
    actual, expected = int8(rows(16, seed=9)), model(rows(16, seed=9))
    assert ((actual - expected).norm() / expected.norm()).item() < 0.06
