"""What is inexact or slow in int8 goes back to float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.quantization.any_model import Net, Recurrent, images, quantized, sqnr
from x86quant.compiled.guarded import GuardedModule
from x86quant.quantization import layer_times, speed
from x86quant.quantization.static import part_search
from x86quant.quantization.tracing.tracing import by_export


class Fragile(nn.Module):
    """Its first layer makes one huge channel, beside which the others vanish."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 16)
        with torch.no_grad():
            self.a.weight[0] *= 1e5
            self.b.weight[:, 0] = 0
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.sin(self.a(x)) + self.a(x))


@pytest.mark.filterwarnings("ignore:this is the float model")
def test_bad_layers_go_back_to_float():
    model = Fragile()
    x = torch.randn(64, 8)
    result = quantized(model, x)
    assert sqnr(model(x), result(x)) > 10
    assert result.quantization.float_layers
    assert min(result.quantization.sqnr_db, default=200) > 10  # none if all of it is float


@pytest.mark.usefixtures("any_accuracy")
def test_what_rounding_makes_undefined_goes_back_to_float():
    class Signs(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y / y.abs()

    model, x = Signs(lambda _, x: F.relu(x)), images()
    result = quantized(model, x)
    assert sqnr(model(x), result(x)) > 10  # codes that are zero would make it NaN
    assert "b" in result.quantization.float_layers


def test_the_summary_tells_the_noise_of_the_whole():
    result = quantized(Net(lambda _, x: F.relu(x)), images())
    (db,) = result.quantization.sqnr_db
    assert 25 < db < 80
    assert "dB against float" in str(result.quantization)


def test_what_is_slower_stays_in_float(monkeypatch):
    monkeypatch.setattr(layer_times, "much_slower", lambda *_: {})
    monkeypatch.setattr(speed, "slower", lambda *_, **__: 1.5)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    model = Net(lambda _, x: F.relu(x))
    result = quantized(model, images())
    assert torch.equal(result(images()), model(images()))
    assert result.quantization.int8_layers == ()
    assert "1.50 times" in str(result.quantization)
    kept = quantized(model, images(), speed_check=False)
    assert kept.quantization.int8_layers == ("a", "b")


def test_single_layers_that_are_to_blame_go_first(monkeypatch):
    model = Net(lambda _, x: F.relu(x))
    losses = [6.2]  # of the first form that is timed
    monkeypatch.setattr(speed, "slower", lambda *_, **__: losses.pop() if losses else None)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(layer_times, "_int8_times", lambda *_: {"a": 900.0, "b": 3.0})
    monkeypatch.setattr(layer_times, "float_times", lambda *_: {"a": 90.0, "b": 10.0})
    result = quantized(model, images())
    assert result.quantization.int8_layers == ("b",)
    assert "10.00 times" in result.quantization.float_layers["a"]
    assert sqnr(model(images()), result(images())) > 25


@pytest.mark.parametrize(
    ("int8", "exact", "found"),
    [
        (900.0, 90.0, {"a": 10.0}),
        (120.0, 90.0, {}),  # a little slower
        (15.0, 3.0, {"a": 5.0}),
        (1.9, 0.1, {}),  # so little time that it does not matter
        (900.0, 0.0, {}),  # no time in float: not a layer that was seen
    ],
)
def test_much_slower_is_what_takes_time_and_clearly_more(int8, exact, found, monkeypatch):
    monkeypatch.setattr(layer_times, "_int8_times", lambda *_: {"a": int8, "b": 3.0})
    monkeypatch.setattr(layer_times, "float_times", lambda *_: {"a": exact, "b": 97.0})
    assert layer_times.much_slower(None, None, ["a", "b"]) == found


def test_a_layer_that_is_disturbed_once_is_not_much_slower(monkeypatch):
    rounds = [{"a": 900.0, "b": 900.0}, {"a": 700.0, "b": 3.0}]
    monkeypatch.setattr(layer_times, "_int8_times", lambda *_: rounds.pop(0))
    monkeypatch.setattr(layer_times, "float_times", lambda *_: {"a": 70.0, "b": 97.0})
    assert layer_times.much_slower(None, None, ["a", "b"]) == {"a": 10.0}
    assert not rounds


def test_what_is_slower_on_one_row_stays_in_float(monkeypatch):
    def slower(_: Any, __: Any, call: Any, **___: Any) -> float | None:
        return 1.5 if call.args[0].shape[0] == 1 else None

    monkeypatch.setattr(layer_times, "much_slower", lambda *_: {})
    monkeypatch.setattr(speed, "slower", slower)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    result = quantized(Net(lambda _, x: F.relu(x)), images())
    assert result.quantization.int8_layers == ()
    assert "1.50 times as long as float on (1, 3, 12, 12)" in str(result.quantization)


def test_sizes_that_run_in_float_are_not_timed(monkeypatch):
    timed: list[int] = []

    def slower(_: Any, __: Any, call: Any, **___: Any) -> None:
        timed.append(call.args[0].shape[0])

    monkeypatch.setattr(speed, "slower", slower)
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    quantized(Net(lambda _, x: x * 2 if x.shape[0] > 1 else F.relu(x)), images())
    assert timed == [8]


@pytest.mark.parametrize(
    ("exact", "int8", "ratio"),
    [
        ([1.0] * 5, [1.3] * 5, 1.3),
        ([1.0] * 5, [1.05] * 5, None),
        ([1.0] * 5, [9.0, 9.0, 1.0, 9.0, 9.0], None),  # as fast once: the rest is noise
        ([1.0, 9.0, 1.0, 9.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0], None),
        ([1.0] * 30, [1.05] * 30, 1.05),
        ([1.0] * 30, [1.01] * 30, None),
        ([1.0] * 30, [1.05] * 18 + [0.95] * 12, None),
        ([1.0] * 10 + [9.0] * 20, [1.2] * 10 + [9.5] * 20, 1.2),  # other work at half of the time
        ([1.0], [1.3], None),  # too few rounds
        ([1.0], [2.0], 2.0),
    ],
)
def test_only_a_clear_loss_counts(exact, int8, ratio):
    assert speed.verdict(exact, int8) == ratio


def test_times_are_taken_in_turns_and_a_loss_twice(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(speed, "perf_counter", lambda: clock[0])
    order = []

    def taking(name: str, seconds: float) -> Callable[[torch.Tensor], None]:
        def function(_: torch.Tensor) -> None:
            order.append(name)
            clock[0] += seconds

        return function

    call = speed.Call((torch.zeros(4),))
    assert speed.slower(taking("float", 0.01), taking("int8", 0.02), call, 0.1) == pytest.approx(2)
    assert order[:4] == ["float", "int8", "float", "int8"]
    assert clock[0] < 0.3
    order.clear()
    assert speed.slower(taking("float", 0.02), taking("int8", 0.01), call, 0.1) is None
    assert len(order) == 8
    # Calls that take longer than there is time for are told apart all the same.
    assert speed.slower(taking("float", 1.0), taking("int8", 1.2), call, 0.1) == pytest.approx(1.2)
    order.clear()
    assert speed.slower(taking("float", 1.0), taking("int8", 0.95), call, 0.1) is None
    assert len(order) == 6
    order.clear()
    assert speed.slower(taking("float", 1.0), taking("int8", 0.8), call, 0.1) is None
    assert len(order) == 2


def test_parts_that_are_slower_stay_in_float(monkeypatch):
    slow: Any = None
    monkeypatch.setattr(layer_times, "much_slower", lambda *_: {})
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(speed, "slower", lambda exact, *_, **__: 3.0 if exact is slow else None)
    model = Recurrent(nn.LSTM)
    prepared_slow: list[Any] = []
    by_part = speed.by_part

    def watched(exact: nn.Module, int8: nn.Module, call: Any, paths: Any) -> Any:
        nonlocal slow
        slow = exact.get_submodule("head")
        prepared_slow.extend(paths)
        return by_part(exact, int8, call, paths)

    monkeypatch.setattr(speed, "by_part", watched)
    result = quantized(model, [torch.randn(4, 4, 10)])
    assert "head" in prepared_slow
    assert "conv" in result.quantization.int8_layers
    assert "3.00 times" in result.quantization.float_layers["head"]


@pytest.mark.parametrize("parts_lose", [True, False])
def test_where_parts_lose_the_whole_must_not_lose_at_all(parts_lose, monkeypatch):
    """All parts of a model may lose, and the whole so little that noise hides it."""
    monkeypatch.setattr(layer_times, "much_slower", lambda *_: {})
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(
        speed, "by_part", lambda *_: dict.fromkeys(_[3], 1.3 if parts_lose else None)
    )
    monkeypatch.setattr(speed, "slower", lambda *_, in_doubt=False: 1.01 if in_doubt else None)
    result = quantized(Recurrent(nn.LSTM), [torch.randn(4, 4, 10)])
    assert bool(result.quantization.int8_layers) is not parts_lose


def test_batches_of_one_sample_give_one_graph_by_export(monkeypatch):
    monkeypatch.setattr(part_search, "WAYS", {"torch.export": by_export})

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(12, 4, 1)
            self.act = nn.SiLU()

        def forward(self, x):
            parts = list(self.act(self.a(x)).chunk(2, 1))
            parts.append(parts[-1].relu())
            return self.b(torch.cat(parts, 1))

    model = Split().eval()
    result = quantized(model, [torch.randn(1, 3, 8, 8) for _ in range(4)])
    assert isinstance(result, GuardedModule)
    assert result.quantization.traced_by == {"": "torch.export"}
    for rows in (1, 3):
        x = torch.randn(rows, 3, 8, 8)
        assert sqnr(model(x), result(x)) > 25


def test_any_loss_that_is_measured_counts_in_doubt():
    exact, int8 = [1.0] * 30, [1.01] * 30
    assert speed.verdict(exact, int8) is None
    assert speed.verdict(exact, int8, speed._BOUNDS_IN_DOUBT) == 1.01
    assert speed.verdict(exact, [0.99] * 30, speed._BOUNDS_IN_DOUBT) is None
