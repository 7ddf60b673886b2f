"""Modules that torch.compile wrapped, tensors with names of torch.fx, layers given a size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from tests.models import TwoLinears, quantized, rows

DATA = [rows(16, seed=seed) for seed in range(2)]


class CompiledWithin(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        wrapped: Any = torch.compile(self.a, backend="eager")
        self.a = wrapped


class CompiledInPlace(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        self.a.compile(backend="eager")


class CompiledFunction(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        self.function = torch.compile(F.relu, backend="eager")

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.function(self.a(x)))


class CompiledBetween(CompiledWithin):
    """Its layers are parts: the whole has no graph."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        return self.b(F.relu(y) if y.detach().sum().item() < 1e9 else y)


class NamedLikeGraphs(TwoLinears):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", rows(8).reshape(4, 32))

    def forward(self, x: torch.Tensor) -> Any:
        nearest = torch.cdist(self.a(x), self.code).argmin(-1)
        return self.b(self.code[nearest])


@pytest.mark.filterwarnings("ignore:the file holds the layers:x86quant.errors.X86QuantWarning")
@pytest.mark.parametrize(
    "kind", [CompiledWithin, CompiledInPlace, CompiledFunction, CompiledBetween, NamedLikeGraphs]
)
def test_wrapped_models_become_int8_and_are_saved(kind: type[TwoLinears], tmp_path: Path) -> None:
    model = kind().eval()
    int8 = quantized(model, DATA)
    assert {"a", "b"} <= set(int8.quantization.int8_layers)
    x = rows(5, seed=9)
    with torch.no_grad():
        actual, expected = int8(x), model(x)
    assert ((actual - expected).norm() / expected.norm()).item() < 0.06
    x86quant.save(int8, tmp_path / "model.x86q")
    assert torch.equal(x86quant.load(tmp_path / "model.x86q", model=kind().eval())(x), actual)


class UpTo(nn.Module):
    """A transposed convolution is told the size of its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.up(F.relu(self.down(x)), output_size=x.shape[-2:])


def test_a_layer_that_is_given_more_than_its_input_stays_in_float() -> None:
    model = UpTo().eval()
    images = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    int8 = quantized(model, [images])
    assert int8.quantization.int8_layers == ("down",)
    for size in (10, 9, 12):
        actual, expected = int8(images[..., :size, :size]), model(images[..., :size, :size])
        assert ((actual - expected).norm() / expected.norm()).item() < 0.06
