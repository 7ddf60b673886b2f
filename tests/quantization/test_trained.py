"""Networks with trained weights: close to float by their own metric, and by every effort."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import x86quant
from benchmarks.trained import audio, digits, scenes
from benchmarks.trained.network import Trained
from x86quant.calling.call import Call
from x86quant.errors import InvalidInputError
from x86quant.quantization import speed, static_recurrent
from x86quant.quantization.choices import Choices
from x86quant.quantization.deciding.layers_in_float import where_float_is_cheap
from x86quant.quantization.kit import accuracy_kit, learning
from x86quant.quantization.kit.bias_correction import BiasCorrection
from x86quant.quantization.kit.float_run import FloatRun
from x86quant.quantization.kit.learning import Learned, learned
from x86quant.quantization.kit.ordered_bias_correction import corrections_in_order
from x86quant.quantization.preparing import prepare
from x86quant.quantization.settings import Settings

NETWORKS = {
    "waves": audio.waves,
    "segmentation": functools.cache(scenes.segmentation),
    "lstm": functools.cache(digits.lstm),
    "gru": digits.gru,
}


def results(network: Trained, model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(*inputs) for inputs in network.test])


@pytest.mark.parametrize("name", NETWORKS)
def test_metric_on_unseen_data_is_floats(name: str) -> None:
    network = NETWORKS[name]()
    int8 = x86quant.quantize(network.model, network.calibration, speed_check=False)
    exact, found = results(network, network.model), results(network, int8)
    # Which weights are trained differs with the CPU's arithmetic, and a few samples stand close to
    # a border: half a point is two of them.
    assert network.score(found) > network.score(exact) - 1.0
    assert float((exact - found).norm() / exact.norm()) < 10 ** (-25 / 20)


@pytest.mark.parametrize(
    ("gain", "close", "mode"),
    [
        (2.0, 25.0, "static"),
        (1.2, 25.0, "static"),
        (None, 25.0, "dynamic"),
        (2.0, 1000.0, "static"),
        (1.2, 1000.0, "dynamic"),
    ],
)
def test_small_recurrent_networks_are_static_where_that_is_faster(
    gain: float | None, close: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By how much depends on how close that is to float."""
    monkeypatch.setattr(static_recurrent, "_CLOSE_DB", close)
    monkeypatch.setattr(static_recurrent, "gained", lambda *_: gain)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(speed, "slower", lambda *_, **__: None)  # than float: nothing is
    network = NETWORKS["lstm"]()
    int8 = x86quant.quantize(network.model, network.calibration)
    assert int8.quantization.mode == mode
    assert (f"{gain} times" in int8.quantization.why) == (mode == "static")


@pytest.mark.parametrize(("loss", "in_float"), [(None, True), (1.5, False)])
def test_at_best_a_noisy_layer_that_takes_no_time_is_float(
    loss: float | None, in_float: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    network = digits.attention()
    settings = Settings(progress=False, effort="best")
    prepared = prepare(network.model, network.calibration, settings)
    found = Choices(prepared, {}, sqnr_db=(30.0,))
    monkeypatch.setattr(speed, "slower", lambda *_, **__: loss)
    chosen, _ = where_float_is_cheap(found, prepared.build())
    assert bool(chosen.reasons) == in_float


@pytest.mark.parametrize("effort", ["fast", "best"])
def test_each_effort_is_close(effort: Any) -> None:
    network = NETWORKS["segmentation"]()
    given = network.calibration
    int8 = x86quant.quantize(network.model, given, effort=effort, speed_check=False)
    exact = results(network, network.model)
    assert float((exact - results(network, int8)).norm() / exact.norm()) < 10 ** (-30 / 20)
    assert bool(int8.quantization.equalized) <= (effort == "best")


def test_best_takes_the_observer_of_the_least_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def noise(_exact: Any, parts: Any, _calls: Any) -> float:
        (part,) = parts
        tried.append(part.ranges.observer)
        return {"mse": 30.0, "percentile": 35.0, "minmax": 32.0}[part.ranges.observer]

    monkeypatch.setattr(accuracy_kit, "_simulated_noise", noise)
    monkeypatch.setattr(accuracy_kit, "STEPS", ())
    network = NETWORKS["segmentation"]()

    def steps(effort: Any, observer: str) -> list[float]:
        settings = Settings(progress=False, equalize=False, effort=effort, observer=observer)
        (part,) = (prepared := prepare(network.model, network.calibration, settings)).parts
        assert prepared.observer == part.ranges.observer
        part.note_ranges()
        return [float(step) for step, _ in part.chosen_before.values()]

    found = steps("best", "auto")
    assert tried == ["mse", "percentile", "minmax"]
    assert found == steps("default", "percentile") != steps("default", "mse")


@pytest.mark.parametrize("weights", [False, True])
def test_what_is_learned_makes_less_noise(weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_ROUNDS", 60)
    network = NETWORKS["segmentation"]()
    settings = Settings(progress=False, equalize=False, bias_correction=False)
    prepared = prepare(network.model, network.calibration, settings)
    (part,) = prepared.parts
    before = Learned.of(part)
    calls = list(prepared.sample)[:2]
    exact = torch.cat([call(network.model) for call in calls]).detach()

    def noise(model: Any) -> float:
        with torch.no_grad():
            return float((torch.cat([call(model) for call in calls]) - exact).square().mean())

    def as_int8() -> float:
        with prepared.simulated(list(prepared.layers)) as model:
            return noise(model)

    plain = as_int8()
    assert noise(prepared.build()) == pytest.approx(plain, rel=0.02)
    one = learned(part, calls, weights=weights)
    assert one is not None
    assert as_int8() == plain  # nothing has changed yet
    one.give(part)
    assert set(one.stretches.values()) != {1.0}
    assert bool(one.weights) == weights
    changes = [
        int((rounded.weight.codes.int() - before.weights[layer].weight.codes.int()).abs().max())
        for layer, rounded in one.weights.items()
    ]
    assert max(changes, default=0) == int(weights)  # other codes, near by
    assert as_int8() < 0.95 * plain
    assert noise(prepared.build()) == pytest.approx(as_int8(), rel=0.02)
    before.give(part)
    assert as_int8() == plain


def test_results_of_pointwise_convolutions_are_rounded_nowhere() -> None:
    """The simulation rounds what the graph rounds: it is what steps are judged by."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1))
    prepared = prepare(model, [torch.randn(2, 3, 9, 9)] * 2, Settings(progress=False))
    (call, *_) = prepared.sample
    built = call(prepared.build())
    with prepared.simulated(list(prepared.layers)) as simulated:
        assert torch.allclose(call(simulated), built, atol=1e-5)


def test_best_keeps_what_was_learned_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS["waves"]()

    def stretches(factors: dict[bool, float]) -> set[float]:
        def found(part: Any, calls: Any, *, weights: bool) -> Learned:
            now = Learned.of(part)
            return Learned(
                dict.fromkeys(now.stretches, factors[weights]), now.corrections, now.weights
            )

        monkeypatch.setattr(accuracy_kit, "learned", found)
        settings = Settings(
            progress=False,
            effort="best",
            equalize=False,
            observer="minmax",
            weight_observer="minmax",
        )
        (part,) = prepare(network.model, network.calibration, settings).parts
        return set(Learned.of(part).stretches.values())

    assert stretches({False: 0.01, True: 0.01}) == {1.0}  # which clips nearly everything
    assert stretches({False: 0.8, True: 0.01}) == {0.8}
    assert stretches({False: 0.01, True: 0.8}) == {0.8}


def test_best_is_never_further_from_float_than_the_default(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Whatever its steps do, the result is judged at the end; what is said is of that one alone."""
    network = NETWORKS["segmentation"]()

    def spoil(calibrated: accuracy_kit.Calibrated) -> None:
        if calibrated.settings.effort == "best":
            for part in calibrated.parts:
                now = Learned.of(part)
                Learned(dict.fromkeys(now.stretches, 0.05), now.corrections, now.weights).give(part)

    monkeypatch.setattr(accuracy_kit, "STEPS", (*accuracy_kit.STEPS, spoil))
    quiet = {"speed_check": False, "progress": False}
    default = x86quant.quantize(network.model, network.calibration, **quiet)
    best = x86quant.quantize(network.model, network.calibration, effort="best", **quiet)
    assert best.quantization.sqnr_db == default.quantization.sqnr_db
    assert any("this is what the default found" in note for note in best.quantization.notes)
    assert torch.equal(results(network, best), results(network, default))
    assert not [one for one in recwarn if "against float" in str(one.message)]


@pytest.mark.parametrize(("gain", "one_graph"), [(2.0, True), (None, False)])
def test_recurrent_layers_and_convolutions_are_one_graph_where_that_is_faster(
    gain: float | None, one_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_recurrent, "gained", lambda *_: gain)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(speed, "slower", lambda *_, **__: None)
    monkeypatch.setattr(speed, "by_part", lambda *_, **__: {})
    torch.manual_seed(0)

    class Columns(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Conv1d(4, 16, 3)
            self.rnn = torch.nn.GRU(16, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.rnn(self.body(x).relu().transpose(1, 2))[0]
            return found

    int8 = x86quant.quantize(Columns(), [torch.randn(4, 4, 20) for _ in range(4)], progress=False)
    assert isinstance(int8, x86quant.CompiledModule) == one_graph


def test_nothing_is_learned_where_no_gradients_go() -> None:
    network = NETWORKS["lstm"]()
    settings = Settings(progress=False, mode="static")
    (part,) = prepare(network.model, network.calibration, settings).parts
    assert learned(part, [Call(x) for x in network.calibration], weights=True) is None


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_recurrent_layer_in_float_may_bring_the_static_form_close(
    spoilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No one range is good for the inputs of the first layer, where that is spoilt."""

    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.LSTM(8, 16, 2, batch_first=True)
            self.head = torch.nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.rnn(x)[0][:, -1])
            return found

    torch.manual_seed(0)
    model, wide = Last(), torch.ones(8)
    if spoilt:
        wide[0] = 3000.0
        with torch.no_grad():
            model.rnn.weight_ih_l0 *= 6 / wide
    monkeypatch.setattr(static_recurrent, "gained", lambda *_: 1.5)
    monkeypatch.setattr(speed, "slower", lambda *_, **__: None)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    data = [(torch.randn(4, 12, 8) * wide,) for _ in range(4)]
    made: Any = x86quant.quantize(model, data, progress=False)
    summary = made.quantization
    assert summary.mode == "static"
    assert list(summary.float_layers) == (["rnn.layer0"] if spoilt else [])


def test_unknown_effort_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="fast, default, best"):
        Settings(effort="much")


def test_in_order_the_mean_of_each_channel_becomes_floats() -> None:
    """The last layer's, that is: of the ones before it, too, but those are rounded and clamped."""
    network = NETWORKS["segmentation"]()
    settings = Settings(progress=False, equalize=False, bias_correction=False)
    prepared = prepare(network.model, network.calibration, settings)
    (part,) = prepared.parts
    calls = list(prepared.sample)

    def off() -> float:
        with prepared.simulated(list(prepared.layers)) as model, torch.no_grad():
            errors = [call(model) - call(network.model) for call in calls]
        return abs(float(torch.cat(errors).mean()))

    before = off()
    measured = BiasCorrection(part)
    for call in calls:
        FloatRun(part, [measured.take]).observe(call)
    assert set(corrections_in_order(part, calls, measured.exact)) == {
        str(layer.node.target) for layer in part.layers if layer.kind.startswith("Conv")
    }
    assert off() < before / 4
