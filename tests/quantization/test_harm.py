"""What each layer does alone: the same, whether the rest of a call is computed again or known."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.models import Residual
from x86quant.calling.running import outputs
from x86quant.errors import X86QuantWarning
from x86quant.lowering import rounded
from x86quant.quantization import harm
from x86quant.quantization.batches import Calibration
from x86quant.quantization.deciding import layers_in_float
from x86quant.quantization.kit import simulation
from x86quant.quantization.layer_products import products
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.preparing import prepare
from x86quant.quantization.settings import Settings


class InPlace(nn.Module):
    """Writes into a value that another layer has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum in place, read twice."""
        y = self.first(x)
        z = self.second(y)
        y += z
        return y.relu_() + z


@pytest.mark.parametrize("model", [Residual, InPlace])
def test_known_values_change_no_harm(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(2, 8, 12, 12),) for _ in range(3)]
    seen: list[tuple[PreparedModel, dict[str, float]]] = []

    def watched(prepared: PreparedModel, names: Collection[str], **how: bool) -> dict[str, float]:
        seen.append((prepared, found := harm.rough_harms(prepared, names, **how)))
        return found

    monkeypatch.setattr("x86quant.quantization.deciding.layers_in_float.rough_harms", watched)
    # No network is good enough, so that every layer is judged.
    monkeypatch.setattr("x86quant.quantization.deciding.layers_in_float.ENOUGH_DB", 1000.0)
    monkeypatch.setattr("x86quant.quantization.deciding.layers_in_float.USABLE_DB", 1000.0)
    with pytest.warns(X86QuantWarning):
        x86quant.quantize(model().eval(), calls, mode="static", speed_check=False, progress=False)
    prepared, rough = seen[0]
    names = list(prepared.layers)
    assert sorted(rough) == sorted(names)
    assert list(rough.values()) == sorted(rough.values())
    found = {one.name: one.sqnr_db for one in harm.harms(prepared, names)}
    exact = list(outputs(prepared.model, prepared.sample))
    for name in names:
        with prepared.simulated([name]) as alone:
            expected = harm.sqnr_between(exact, list(outputs(alone, prepared.sample)))
        assert found[name] == expected


@pytest.mark.parametrize("worst", [{17}, {3, 90}, set()])
def test_of_many_layers_those_that_harm_most_are_searched_for(
    worst: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 4, 1) for _ in range(100)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)  # so that noise is as loud behind many
        nn.init.zeros_(layer.bias)
    for place in worst:  # one scale for channels of very different sizes
        with torch.no_grad():
            layers[place].weight[0] *= 500
            layers[place + 1].weight[:, 0] = 0
    options = Settings(progress=False, speed_check=False, mode="static", equalize=False)
    calls = [(torch.randn(2, 4, 6, 6),) for _ in range(2)]
    prepared = prepare(nn.Sequential(*layers).eval(), calls, options)
    names = list(prepared.layers)
    runs = []
    real = PreparedModel.simulated

    def counted(self: PreparedModel, tried: Collection[str], **more: Any) -> Any:
        runs.append(tried)
        return real(self, tried, **more)

    monkeypatch.setattr(PreparedModel, "simulated", counted)
    rough = harm.rough_harms(prepared, names, search=True)
    assert len(runs) < 2 * harm._MOST_RUNS + 2
    assert sorted(rough) == sorted(names)
    assert list(rough.values()) == sorted(rough.values())
    each = harm.rough_harms(prepared, names)
    assert set(list(each)[: len(worst)]) == set(map(str, worst))
    assert set(list(rough)[: len(worst)]) == set(map(str, worst))


def test_only_layers_that_harm_most_are_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which together do less than half of the noise, by one call."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
    with torch.no_grad():  # one scale for channels of very different sizes
        layers[1].weight[0] *= 500
        layers[1].weight[1:, 0] = layers[2].weight[:, 0] = 0
    calls = [(torch.randn(2, 8, 12, 12),) for _ in range(3)]
    options = Settings(progress=False, speed_check=False, mode="static", equalize=False)
    prepared = prepare(nn.Sequential(*layers).eval(), calls, options)
    names = list(prepared.layers)
    runs: list[tuple[int, str]] = []
    kept = []  # so that no other has its number
    real = PreparedModel.simulated

    def counted(self: PreparedModel, tried: Collection[str], **more: Any) -> Any:
        kept.append(more["known"])
        runs.append((id(more["known"]), *tried))
        return real(self, tried, **more)

    monkeypatch.setattr(PreparedModel, "simulated", counted)
    rough = harm.rough_harms(prepared, names)
    first, second = [[n for k, n in runs if k == key] for key in dict.fromkeys(k for k, _ in runs)]
    assert first == names
    assert 0 < len(second) < len(names)
    assert next(iter(rough)) in second
    for calls_of, some in ((1, set(names) - set(second)), (2, set(second))):
        short = dataclasses.replace(prepared, sample=prepared.halves.calls[:calls_of])
        exact = {one.name: one.sqnr_db for one in harm.harms(short, names)}
        assert {n: rough[n] for n in some} == {n: exact[n] for n in some}


def test_layers_are_ranked_by_large_calls_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)]
    settings = Settings(progress=False, speed_check=False, mode="static")
    seen: set[str] = set()

    def watched(model: nn.Module, calls: Any, flat: Any) -> Any:
        seen.update(map(str, calls))
        return outputs(model, calls, flat)

    monkeypatch.setattr(harm, "outputs", watched)
    free = nn.Sequential(*layers)
    of_one_size = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 80 * 64, 1))
    for model, shape in ((free, "(1, 8, 40, 32)"), (of_one_size, "(1, 8, 80, 64)")):
        prepared = prepare(model.eval(), [torch.randn(1, 8, 80, 64) for _ in range(2)], settings)
        seen.clear()
        harm.rough_harms(prepared, list(prepared.layers))
        assert seen == {shape}


def test_values_that_a_layer_writes_to_are_not_kept() -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(2, 8, 12, 12),) for _ in range(2)]
    data = Calibration(calls, Residual())
    settings = Settings(progress=False, speed_check=False, mode="static")
    prepared = prepare(Residual().eval(), calls, settings)
    (part,) = prepared.parts
    inputs = part.inputs(data.sample[0])
    assert inputs is not None
    known = simulation.FloatValues()
    values = known.of(part, inputs)
    assert values is not None
    known.check(part)
    assert known.of(part, inputs) is values
    next(x for x in values.values() if isinstance(x, torch.Tensor)).add_(1)
    known.check(part)
    assert known.of(part, inputs) is not values


class Drifting(nn.Module):
    """Eight layers, of which the range of the first alone depends on how large the input is.

    It gives one number a row, which is no choice between classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16 if i < 7 else 1) for i in range(8))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, 1.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 0.1 * self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x


def test_layers_whose_ranges_do_not_hold_go_back_to_float() -> None:
    """Ranges that have seen all data fit: what is wrong shows on calls held back alone."""
    torch.manual_seed(0)
    model, calls = Drifting(), [torch.randn(32, 16) for _ in range(8)]
    calls[7] *= 3.0
    int8 = x86quant.quantize(model, calls, speed_check=False, progress=False)
    summary = int8.quantization
    assert min(summary.sqnr_db) >= 20
    assert "layers.0" in summary.float_layers
    assert len(summary.float_layers) <= 4


@pytest.mark.parametrize("spoilt", [True, False])
def test_what_is_never_enough_is_taken_where_it_is_clearly_better(
    spoilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(8)]
    if spoilt:
        with torch.no_grad():  # one scale for channels of very different sizes
            layers[3].weight[0] *= 300
            layers[4].weight[:, 0] = 0
    monkeypatch.setattr("x86quant.quantization.deciding.layers_in_float.ENOUGH_DB", 1000.0)
    calls = [(torch.randn(2, 8, 12, 12),) for _ in range(3)]
    with pytest.warns(X86QuantWarning, match="harm it most"):
        made: Any = x86quant.quantize(
            nn.Sequential(*layers).eval(), calls, mode="static", speed_check=False, progress=False,
            equalize=False,
        )  # fmt: skip
    assert ("3" in made.quantization.float_layers) == spoilt
    assert len(made.quantization.float_layers) == (2 if spoilt else 0)


@pytest.mark.parametrize("effort", ["default", "best"])
def test_what_takes_much_time_in_float_has_to_gain_much(
    effort: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst layer has nearly all products."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 64, 3, padding=1), nn.Conv2d(64, 8, 5, padding=2)]
    layers += [nn.Conv2d(8, 8, 1) for _ in range(4)]
    with torch.no_grad():  # one scale for channels of very different sizes
        layers[0].weight[0] *= 40
        layers[1].weight[:, 0] = 0
    monkeypatch.setattr("x86quant.quantization.deciding.layers_in_float._MOST_IN_FLOAT", 0.5)
    monkeypatch.setattr("x86quant.quantization.deciding.layers_in_float._ALL_IN_FLOAT_DB", 1000.0)
    monkeypatch.setattr("x86quant.quantization.deciding.layers_in_float.ENOUGH_DB", 1000.0)
    calls = [(torch.randn(2, 8, 12, 12),) for _ in range(3)]
    with pytest.warns(X86QuantWarning, match="harm it most"):
        made: Any = x86quant.quantize(
            nn.Sequential(*layers).eval(), calls, mode="static", speed_check=False, progress=False,
            equalize=False, effort=effort,
        )  # fmt: skip
    assert bool(made.quantization.float_layers) == (effort == "best")


class Power(nn.Module):
    """As a spectrogram: few codes for what a logarithm spreads again."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.head = nn.Conv1d(1, 16, 32, 8), nn.Conv1d(16, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bank(x)
        return self.head(torch.log(y * y + 1e-3))


@pytest.mark.parametrize(("gain", "enough"), [(6.0, 1000.0), (1000.0, 20.0), (1000.0, 1000.0)])
def test_steps_between_products_are_float_where_that_gains_much_or_is_enough(
    gain: float, enough: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(layers_in_float, "_CLEAR_GAIN", gain)
    monkeypatch.setattr(layers_in_float, "ENOUGH_DB", enough)
    calls = [(torch.randn(2, 1, 400),) for _ in range(6)]
    told = pytest.warns(X86QuantWarning) if enough > 20 else contextlib.nullcontext()
    with told:
        made = x86quant.quantize(Power().eval(), calls, speed_check=False, progress=False)
    neither = gain > 6 and enough > 20
    assert set(made.quantization.float_layers) == (set() if neither else {"mul", "add"})


def test_products_of_each_layer_are_counted() -> None:
    """Of a row: what there is to calibrate with is taken apart."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 5),
    ).eval()  # fmt: skip
    settings = Settings(progress=False, speed_check=False, mode="static")
    prepared = prepare(model, [(torch.randn(2, 3, 8, 8),)], settings)
    found = {name: count for name, count in products(prepared).items() if count}
    assert found == {
        "0": 8 * 64 * 27, "2": 8 * 16 * 9, "4": 5 * 128
    }  # fmt: skip


def test_where_the_most_is_never_enough_nothing_less_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(8)]
    tried: list[int] = []
    real = layers_in_float.sqnrs_with

    def counted(prepared: PreparedModel, names: Any, *, held_back: bool = False) -> Any:
        tried.append(8 - len(names))
        return real(prepared, names, held_back=held_back)

    monkeypatch.setattr(layers_in_float, "sqnrs_with", counted)
    monkeypatch.setattr(layers_in_float, "_MOST_IN_FLOAT", 0.5)
    monkeypatch.setattr(layers_in_float, "ENOUGH_DB", 1000.0)
    calls = [(torch.randn(2, 8, 12, 12),) for _ in range(3)]
    with pytest.warns(X86QuantWarning, match="harm it most"):
        x86quant.quantize(
            nn.Sequential(*layers).eval(), calls, mode="static", speed_check=False, progress=False
        )
    assert tried == [4]


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_is_added_whatever_its_size(size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = (torch.randn(50, 40) * size).to(dtype)
    actual = exact * torch.tensor(1.125, dtype=dtype)
    infinite, nan = actual.clone(), actual.clone()
    infinite[3, 4], nan[3, 4] = float("inf"), float("nan")
    assert harm.sqnr_between([exact], [actual]) == pytest.approx(18.06, abs=0.1)
    assert harm.sqnr_between([exact], [exact.clone()]) == harm._PERFECT
    for wrong in (infinite, nan, actual[:, 1:]):
        assert harm.sqnr_between([exact], [wrong]) == -harm._PERFECT
    masked, empty = exact.clone(), exact[:0]
    masked[3, 4] = -float("inf")
    found = actual.clone()
    found[3, 4] = -float("inf")
    assert harm.sqnr_between([masked], [found]) == pytest.approx(18.06, abs=0.1)
    assert harm.sqnr_between([masked], [actual]) == -harm._PERFECT
    assert harm.sqnr_between([exact, empty], [actual, empty]) == pytest.approx(18.06, abs=0.1)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.Hardswish()], ids=str)
def test_what_is_fused_is_computed_in_place_where_nobody_looks(activation: nn.Module) -> None:
    torch.manual_seed(0)
    x = 6 * torch.randn(40)
    exact, y = activation(x), x.clone()
    found = rounded.activated(y, activation)
    assert torch.equal(found, exact)
    assert (found.data_ptr() == y.data_ptr()) == (type(activation) in rounded._IN_PLACE)
    kept: list[torch.Tensor] = []
    handle = activation.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    assert torch.equal(rounded.activated(x, activation), exact)
    handle.remove()
    assert torch.equal(activation(kept[0]), exact)
    assert kept[0].min() < 0
    rounded.activated(x.clone().requires_grad_() * 1.0, activation).sum().backward()
