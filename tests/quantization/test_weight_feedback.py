"""Codes of weights that make up for each other's rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.lowering.rounded import Int8Weight
from x86quant.quantization.kit import accuracy_kit, weight_feedback
from x86quant.quantization.preparing import prepare
from x86quant.quantization.settings import Settings
from x86quant.quantization.static.conversion import product_names
from x86quant.quantization.tracing.recurrent_layers import LSTMLayer, is_recurrent_layer

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(24, 8), (6, 5, 24)),
    "conv": (nn.Conv2d(8, 12, 3, padding=1), (2, 8, 9, 7)),
    "strided": (nn.Conv2d(8, 12, (2, 3), (2, 1), (0, 1), (1, 2)), (2, 8, 10, 12)),
    "groups": (nn.Conv2d(8, 12, 3, groups=2), (2, 8, 9, 9)),
    "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8, padding_mode="reflect"), (2, 8, 9, 9)),
    "conv1d": (nn.Conv1d(8, 12, 5, padding="same"), (2, 8, 20)),
    "conv3d": (nn.Conv3d(4, 6, 2), (2, 4, 5, 6, 4)),
    "of one sample": (nn.Conv2d(8, 12, 3), (8, 9, 7)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_windows_times_weights_are_the_layer(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    x = torch.randn(shape)
    windows = weight_feedback._windows(layer, x)
    weight = layer.weight.reshape(len(windows), -1, windows.shape[2])
    found = (windows @ weight.transpose(1, 2)).transpose(0, 1).flatten(1)
    y = layer(x) - layer(torch.zeros_like(x))
    channel = -1 if isinstance(layer, nn.Linear) else y.dim() - layer.weight.dim() + 1
    expected = y.movedim(channel, -1).flatten(0, -2)
    assert len(expected) <= weight_feedback._WINDOWS
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_of_many_windows_some_are_looked_at() -> None:
    least, most = weight_feedback._LEAST_WINDOWS, weight_feedback._WINDOWS
    for channels, count in ((2, least), (40, 2 * 40 * 9), (100, most)):
        layer = nn.Conv2d(channels, 3, 3)
        windows = weight_feedback._windows(layer, torch.randn(4, channels, 60, 60))
        assert windows.shape == (1, count, 9 * channels)
    assert weight_feedback._windows(layer, torch.randn(1, 100, 60, 60), 0.25).shape[1] == most // 4


@pytest.mark.parametrize("groups", [1, 4])
def test_the_results_come_closer_though_the_weights_do_not(groups: int) -> None:
    torch.manual_seed(0)
    taps = 32
    weight = torch.randn(16, taps)
    scales = weight.abs().amax(1) / 127
    plain = Int8Weight((weight / scales[:, None]).round().to(torch.int8), scales, 0)
    x = torch.randn(groups, 512, 4) @ torch.randn(groups, 4, taps)  # taps that go together
    x = x + 0.05 * torch.randn(groups, 512, taps)
    codes = weight_feedback._codes(weight, plain, x.transpose(1, 2) @ x)

    def error(some: torch.Tensor) -> float:
        off = (some.float() * scales[:, None] - weight).reshape(groups, -1, taps)
        return float((x @ off.transpose(1, 2)).square().sum())

    assert error(codes) < 0.5 * error(plain.codes)
    assert float((codes.float() - plain.codes).abs().max()) >= 1


@pytest.mark.parametrize("at_once", [1, 5, 64])
def test_how_many_taps_go_at_once_changes_nothing_but_time(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(6, 32).double(), torch.randn(2, 512, 32)
    scales = weight.abs().amax(1) / 127
    plain = Int8Weight(torch.zeros(6, 32, dtype=torch.int8), scales, 0)
    squares = x.transpose(1, 2) @ x
    expected = torch.zeros(2, 3, 32)
    left, spread = weight.reshape(2, 3, 32).clone(), weight_feedback._spread(squares)
    for tap in range(32):
        step = scales.reshape(2, 3).float()
        expected[..., tap] = (left[..., tap] / step).round().clamp(-127, 127)
        off = (left[..., tap] - expected[..., tap] * step) / spread[:, tap, tap, None]
        left[..., tap:] -= off[..., None] * spread[:, None, tap, tap:]
    monkeypatch.setattr(weight_feedback, "_AT_ONCE", at_once)
    found = weight_feedback._codes(weight.float(), plain, squares)
    assert torch.equal(found.reshape(2, 3, 32).float(), expected)


def network() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    blocks = [nn.Conv2d(16, 16, 3, padding=1, groups=g) for g in (16, 1, 16, 1)]
    layers = [layer for block in blocks for layer in (block, nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.Flatten(), nn.Linear(1600, 5))
    smooth = [
        F.interpolate(torch.randn(4, 3, 4, 4), size=(10, 10), mode="bilinear") for _ in range(6)
    ]
    return model.eval(), smooth


def weights_of(model: nn.Module, data: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
    prepared = prepare(model, data, Settings(progress=False, equalize=False, **more))
    (part,) = prepared.parts
    return [part.rounded_layer(x.node, part.module(x.node)).weight.codes for x in part.layers]


@pytest.mark.parametrize("after", [29.0, 31.0])
def test_it_is_kept_where_it_helps(after: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = network()
    plain = weights_of(model, data, effort="fast")
    noises = iter([30.0, after])
    monkeypatch.setattr(accuracy_kit, "STEPS", (accuracy_kit.feed_back,))
    monkeypatch.setattr(accuracy_kit, "_simulated_noise", lambda *_, **__: next(noises))
    found = weights_of(model, data)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)) == (after < 30)


def test_what_runs_has_the_weights_that_were_chosen() -> None:
    model, data = network()
    prepared = prepare(model, data, Settings(progress=False))
    x = data[0]
    with prepared.simulated(list(prepared.layers)) as simulated, torch.no_grad():
        expected = simulated(x)
    found = prepared.build()(x)
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def test_observers_of_weights_that_were_asked_for_choose_them() -> None:
    model, data = network()
    plain = weights_of(model, data, effort="fast", weight_observer="minmax")
    asked = weights_of(model, data, weight_observer="minmax")
    assert all(torch.equal(a, b) for a, b in zip(plain, asked, strict=True))
    assert x86quant.quantize(model, data, speed_check=False, progress=False).quantization.sqnr_db


def test_a_layer_that_was_given_too_much_keeps_its_weights() -> None:
    """Squares of these leave float32, of which no factor can be found."""
    model, data = network()
    plain = weights_of(model, [x * 1e30 for x in data])
    assert all(torch.isfinite(weight.float()).all() for weight in plain)


@torch.no_grad()
def test_a_recurrent_layer_meets_its_input_and_the_states_of_other_steps() -> None:
    torch.manual_seed(0)
    layer = LSTMLayer(6, 4, batch_first=True, bidirectional=True).eval()
    x, h, c = torch.randn(3, 5, 6), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    states = layer(x, h, c)
    met = weight_feedback._met_by_recurrent(layer, x, states, h)
    rows = {name: found[0] for name, found in met.items()}
    assert torch.equal(rows["weight_ih_l0"], x.reshape(-1, 6))
    assert torch.equal(rows["weight_ih_l0_reverse"], x.reshape(-1, 6))
    forward, backward = states[:, :-1, :4], states[:, 1:, 4:]
    assert torch.equal(rows["weight_hh_l0"], torch.cat([h[0], forward.reshape(-1, 4)]))
    assert torch.equal(rows["weight_hh_l0_reverse"], torch.cat([h[1], backward.reshape(-1, 4)]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_come_closer(
    kind: type[nn.LSTM] | type[nn.GRU], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    basis = torch.randn(4, 24)  # features that go together
    model = Last(kind(24, 32, batch_first=True)).eval()
    data = [torch.randn(8, 12, 4) @ basis for _ in range(6)]

    def weights_left() -> float:
        """The error of the results that the weights alone make."""
        prepared = prepare(model, data, Settings(mode="static", progress=False))
        (part,) = prepared.parts
        (layer,) = (x for x in part.layers if is_recurrent_layer(part.module(x.node)))
        module = part.module(layer.node)
        assert module is not None
        weights, _ = part.rounded_products(layer.node, module)
        rounded = copy.deepcopy(module)
        for name, weight in zip(product_names(module), weights, strict=True):
            getattr(rounded, f"weight_{name}").data = weight.real()
        x = torch.randn(8, 12, 4) @ basis
        with torch.no_grad():
            return float((rounded(x) - module(x)).square().mean())

    found = weights_left()
    monkeypatch.setattr(accuracy_kit, "STEPS", ())
    assert found < 0.5 * weights_left()


class Last(nn.Module):
    """The last states of a recurrent network."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rnn(x)[0][:, -1]
        return found
