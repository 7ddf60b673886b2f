"""Float convolutions of runs that are only watched give what torch gives."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import x86quant
from x86quant import extension
from x86quant.calling.float_convolutions import Panels, native_float_convolutions
from x86quant.packing.float_panels import float_panels

LAYERS = [
    (nn.Conv2d(16, 70, 1), (2, 16, 40, 33)),
    (nn.Conv2d(300, 40, 1, bias=False), (3, 300, 11, 13)),
    (nn.Conv2d(1, 64, (129, 1), (4, 1)), (4, 1, 800, 1)),
    (nn.Conv2d(32, 48, (9, 1)), (2, 32, 200, 1)),
    (nn.Conv2d(24, 40, (1, 7), (1, 3)), (2, 24, 1, 900)),
    (nn.Conv1d(64, 80, 5, 2), (3, 64, 300)),
]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = extension.native().float_rows

    class Counting:
        def __getattr__(self, name: str) -> object:
            if name == "float_rows":
                calls.append(1)
                return real
            return getattr(native, name)

    native = extension.native()
    monkeypatch.setattr(extension, "native", Counting)
    return calls


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("layer", "sizes"), LAYERS, ids=str)
def test_products(
    layer: nn.Module, sizes: tuple[int, ...], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    if last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    calls = _counted(monkeypatch)
    with torch.no_grad():
        wanted = layer(x)
        with native_float_convolutions():
            found = layer(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert len(calls) == 1
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=0)
    assert len(calls) == 1


OTHERS = [
    (nn.Conv2d(16, 32, 3), (2, 16, 40, 33)),
    (nn.Conv2d(16, 64, 1, padding=1), (2, 16, 40, 33)),
    (nn.Conv2d(16, 64, 1, stride=2), (2, 16, 80, 66)),
    (nn.Conv2d(64, 64, 1, groups=2), (2, 64, 40, 33)),
    (nn.Conv1d(64, 80, 5, dilation=2), (3, 64, 300)),
    (nn.Conv2d(16, 64, 1).double(), (2, 16, 40, 33)),
    (nn.Conv1d(64, 80, 5), (64, 300)),
]


@pytest.mark.parametrize(("layer", "sizes"), OTHERS, ids=str)
def test_other_layers_are_torchs(
    layer: nn.Module, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _counted(monkeypatch)
    x = torch.randn(sizes, dtype=next(layer.parameters()).dtype)
    with torch.no_grad():
        wanted = layer(x)
        with native_float_convolutions():
            assert torch.equal(layer(x), wanted)
    assert not calls


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize(("layer", "sizes"), LAYERS, ids=str)
def test_other_numbers_of_channels_are_refused(
    layer: nn.Module, sizes: tuple[int, ...], more: int
) -> None:
    batch, channels, *spatial = sizes
    x = torch.randn(batch, channels + more, *spatial)
    with (
        torch.no_grad(),
        native_float_convolutions(),
        pytest.raises(RuntimeError, match="channels"),
    ):
        layer(x)


def test_models_of_products_alone_are_quantized() -> None:
    """Inputs with another number of channels are tried, and must be seen to be none."""
    model = nn.Sequential(nn.Conv2d(96, 96, 1), nn.ReLU(), nn.Conv2d(96, 8, 1)).eval()
    x = torch.randn(1, 96, 112, 112, generator=torch.Generator().manual_seed(0))
    assert x86quant.quantize(model, [(x,)], progress=False)(x).shape == (1, 8, 112, 112)


def test_other_threads_and_gradients_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _counted(monkeypatch)
    layer, x = nn.Conv2d(16, 70, 1), torch.randn(2, 16, 40, 33)

    def run() -> None:
        with torch.no_grad():
            layer(x)

    with native_float_convolutions():
        other = threading.Thread(target=run)
        other.start()
        other.join()
        layer(x).sum().backward()
    assert not calls
    assert layer.weight.grad is not None
    assert nn.Conv2d._conv_forward.__module__ == "torch.nn.modules.conv"


def test_parameters_are_those_of_the_moment() -> None:
    torch.manual_seed(0)
    first, second = (nn.Conv2d(64, 64, 1) for _ in range(2))
    second.weight = first.weight  # two layers, whose biases differ
    x = torch.randn(2, 64, 24, 24)
    panels = Panels()
    with torch.no_grad():
        for change in (0.0, 1.0, 0.0):
            for parameter in first.parameters():
                parameter.add_(change)
            for layer in (first, second):
                wanted = layer(x)
                for _ in range(2):
                    with native_float_convolutions(panels):
                        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)


def test_products_that_do_not_fit_are_refused() -> None:
    rows = extension.native().float_rows
    x = torch.randn(2, 20)
    weight, bias = float_panels(torch.randn(3, 6), None)
    assert rows(x, weight, bias, 3, 8, 2).shape == (2, 8, 3)
    wrong: list[tuple[object, ...]] = [
        (x, weight, bias, 3, 9, 2),
        (x, weight, bias[:2], 3, 8, 2),
        (x, weight, bias, 3, 0, 2),
        (x, weight, bias, 3, 8, 0),
        (x, weight, bias, 0, 8, 2),
        (x, weight, bias, 17, 8, 2),
        (x, weight[..., :8], bias, 3, 8, 2),
        (x.double(), weight, bias, 3, 8, 2),
        (x[0], weight, bias, 3, 8, 2),
        (x, *float_panels(torch.randn(3, 21), None), 3, 1, 1),
        (x, weight[:0], bias, 3, 8, 2),
    ]
    for one in wrong:
        with pytest.raises(ValueError, match="do not fit each other"):
            rows(*one)
