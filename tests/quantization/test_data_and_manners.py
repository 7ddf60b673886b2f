"""Data in any form, and what ``quantize`` leaves alone."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.quantization.any_model import Branches, Net, clamp, images, quantized, sqnr
from x86quant.errors import InvalidInputError, X86QuantWarning
from x86quant.quantization.kit import equalization


class OneMapping(nn.Module):
    """Takes all of its inputs as one mapping, which it adds its result to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.eval()

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        features["out"] = self.head(F.relu(self.layer(features["x"])))
        return features


def test_a_mapping_can_be_the_only_argument():
    model, x = OneMapping(), torch.randn(8, 16)
    data = [{"x": x, "mask": x > 0}, {"x": x + 1, "mask": x > 1}]
    result = quantized(model, data)
    assert set(data[0]) == {"x", "mask"}
    assert result.quantization.int8_layers
    assert sqnr(model({"x": x})["out"], result({"x": x})["out"]) > 25


class SizesItself(Net):
    """Keeps a size of its last input, as windowed attentions do."""

    window = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if min(x.shape[2:]) < self.window:
            self.window = 1
        return super().forward(x) * self.window


def test_what_a_model_keeps_is_not_left_from_trial_sizes():
    model = SizesItself(lambda _, x: F.relu(x))
    result = quantized(model, images())
    assert sqnr(model(images(seed=1)), result(images(seed=1))) > 25
    assert model.window == SizesItself.window


class InstallsHooks(Net):
    """Hooks a layer at its first call, as recent transformers do to collect hidden states."""

    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "hooked"):
            self.hooked = True
            self.a.register_forward_hook(lambda m, a, y: _FOUND.append(y))
        _FOUND.clear()
        return super().forward(x), len(_FOUND), _FOUND[0]


_FOUND: list[torch.Tensor] = []


def test_hooks_that_a_first_call_installs():
    model = InstallsHooks(lambda _, x: F.relu(x))
    result = quantized(model, images())
    for _ in range(2):
        (a, n, h), (b, m, g) = model(images(seed=1)), result(images(seed=1))
        assert n == m == 1
        assert sqnr(a, b) > 25
        assert sqnr(h, g) > 25


class Deep(nn.Module):
    """Blocks in blocks, none of which can be a graph."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.inner = Deep(depth - 1) if depth else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.layer(x))
        return y if y.isnan().any() else torch.tanh(y)


def test_the_search_for_parts_runs_a_deep_model_once_a_level():
    torch.manual_seed(0)
    model = Deep(7).eval()
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    model.layer.register_forward_hook(count)
    result = quantized(model, torch.randn(8, 8), mode="static")
    assert len(result.quantization.int8_layers) >= 7
    assert runs < 60
    assert sqnr(model(torch.ones(2, 8)), result(torch.ones(2, 8))) > 15


class Tied(nn.Module):
    """A table that is also the head's weight, behind a layer norm with outliers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight
        with torch.no_grad():
            self.norm.weight[::7] *= 60
        self.eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(tokens)))


@pytest.mark.parametrize("smooth", ["auto", True])
def test_smoothing_leaves_tied_weights_alone(smooth):
    model, tokens = Tied(), torch.randint(0, 50, (4, 12))
    result = quantized(model, tokens, smooth_quant=smooth)
    assert sqnr(model(tokens), result(tokens)) > 20


def test_equalization_leaves_tied_weights_alone():
    torch.manual_seed(0)
    a, b, c = (nn.Conv2d(4, 4, 1, bias=False) for _ in range(3))
    with torch.no_grad():
        a.weight[0] *= 1e3
    c.weight = a.weight
    model = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c).eval()
    x = torch.randn(8, 4, 6, 6)
    result = quantized(model, x, equalize=True)
    plain = quantized(model, x, equalize=False)
    assert sqnr(model(x), result(x)) > sqnr(model(x), plain(x)) - 3


@pytest.mark.filterwarnings("ignore:this is the float model")
def test_a_step_that_harms_unseen_data_is_not_taken(monkeypatch):
    def spoil(*_: Any, **__: Any) -> tuple[Any, ...]:
        scales = torch.ones(8)
        scales[0] = 1e-4  # the same function, and a useless range
        return (equalization.Equalized("", "a", "b", scales, 0.1),)

    monkeypatch.setattr(equalization, "worthwhile", spoil)
    model = Net(lambda _, x: F.relu(x))
    data = [images(seed=seed) for seed in range(4)]
    assert quantized(model, data).quantization.equalized == ()
    assert len(quantized(model, data, equalize=True).quantization.equalized) == 1


def test_batches_of_a_wrong_shape_are_named():
    with pytest.raises(InvalidInputError, match="fails on the first calibration batch"):
        quantized(Net(lambda _, x: x), torch.randn(4, 5, 8, 8))


def test_later_batches_that_the_model_does_not_take_are_named():
    data = [torch.randn(4, 3, 8, 8)] * 3 + [torch.randn(4, 5, 8, 8)]
    with pytest.raises(InvalidInputError, match=r"fails on a calibration batch, of .*4, 5, 8, 8"):
        quantized(Net(lambda _, x: x), data)


def test_data_of_zeros_is_warned_about():
    with pytest.warns(X86QuantWarning, match="zero"):
        quantized(Net(lambda _, x: x), torch.zeros(4, 3, 8, 8))


def test_random_numbers_are_left_alone():
    model = Net(clamp)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    quantized(model, images())
    assert torch.equal(torch.rand(4), expected)


def test_threads_quantize_side_by_side():
    results: list[Any] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            results.append(quantized(Net(clamp), images(seed=seed)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(results) == 3


def test_copies_of_guarded_modules_work():
    model = Branches(lambda _, x: x)
    result = copy.deepcopy(quantized(model, images()))
    x = images(4)
    assert sqnr(model(x), result(x)) > 25
