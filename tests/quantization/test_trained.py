"""Networks with trained weights: close to float by their own metric, and by every effort."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import x86quant
from benchmarks.trained import audio, digits, scenes
from benchmarks.trained.network import Trained
from x86quant.errors import InvalidInputError
from x86quant.quantization import speed, static_recurrent
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
    assert network.score(found) > network.score(exact) - 0.5
    assert float((exact - found).norm() / exact.norm()) < 10 ** (-25 / 20)


@pytest.mark.parametrize(("gain", "mode"), [(2.0, "static"), (None, "dynamic")])
def test_small_recurrent_networks_are_static_where_that_is_faster(
    gain: float | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_recurrent, "gained", lambda *_: gain)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(speed, "slower", lambda *_, **__: None)  # than float: nothing is
    network = NETWORKS["lstm"]()
    int8 = x86quant.quantize(network.model, network.calibration)
    assert int8.quantization.mode == mode
    assert ("2.0 times" in int8.quantization.why) == (gain is not None)


@pytest.mark.parametrize("effort", ["fast", "best"])
def test_each_effort_is_close(effort: Any) -> None:
    network = NETWORKS["segmentation"]()
    given = network.calibration
    int8 = x86quant.quantize(network.model, given, effort=effort, speed_check=False)
    exact = results(network, network.model)
    assert float((exact - results(network, int8)).norm() / exact.norm()) < 10 ** (-30 / 20)
    assert bool(int8.quantization.equalized) <= (effort == "best")


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
    assert set(corrections_in_order(part, calls)) == {
        str(layer.node.target) for layer in part.layers if layer.kind.startswith("Conv")
    }
    assert off() < before / 4
