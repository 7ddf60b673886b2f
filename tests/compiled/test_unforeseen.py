"""Errors that nobody foresaw are sentences, unless they are the user's or somebody asks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantWarning
from x86quant.runtime import Segment

DATA = [torch.randn(4, 16) for _ in range(3)]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def _failing() -> Any:
    """A function that raises, as if it stood in x86quant's own code."""
    path = f"{next(iter(x86quant.__path__))}/anywhere.py"
    names: dict[str, Any] = {}
    exec(compile("def call(*_, **__):\n    raise KeyError('of ours')\n", path, "exec"), names)
    return names["call"]


fails = _failing()


@pytest.mark.usefixtures("as_in_use")
def test_a_stage_that_fails_refuses_in_a_sentence(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("x86quant.quantization.preparing.find_parts", fails)
    with pytest.raises(UnsupportedError, match=r"Sequential cannot .* \(KeyError: 'of ours'\)"):
        x86quant.quantize(model, DATA)


@pytest.mark.usefixtures("as_in_use")
def test_a_form_that_cannot_be_built_leaves_the_model_in_float(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("x86quant.quantization.prepared.PreparedModel.build", fails)
    with pytest.warns(X86QuantWarning, match="stays in float: x86quant failed in a way that"):
        fast = x86quant.quantize(model, DATA)
    assert torch.equal(fast(DATA[0]), model(DATA[0]))
    assert not fast.quantization.int8_layers


@pytest.mark.usefixtures("as_in_use")
def test_a_call_that_cannot_be_planned_runs_in_plain_torch(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = x86quant.quantize(model, DATA)
    expected = fast(DATA[0])
    monkeypatch.setattr(Segment, "forward", fails)
    monkeypatch.setattr(Segment, "run_again", lambda *_: None)
    with pytest.warns(X86QuantWarning, match="plain torch, slowly"):
        found = fast(DATA[0])
    assert torch.equal(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(DATA[0]), expected)


@pytest.mark.usefixtures("as_in_use")
def test_a_call_that_plain_torch_cannot_take_either_raises(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = x86quant.quantize(model, DATA)
    monkeypatch.setattr(Segment, "forward", fails)
    with pytest.raises(KeyError, match="of ours"):
        fast(torch.randn(4, 17))


def test_somebody_who_asks_sees_the_traceback(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("x86quant.quantization.prepared.PreparedModel.build", fails)
    with pytest.raises(KeyError, match="of ours"):
        x86quant.quantize(model, DATA)


@pytest.mark.usefixtures("as_in_use")
def test_what_the_users_code_raises_is_passed_on(model: nn.Module) -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield DATA[0]
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        x86quant.quantize(model, batches())
    with pytest.raises(KeyError, match="theirs"):
        x86quant.quantize(model, DATA, metric=lambda _: {}["theirs"])
    with pytest.raises(InvalidInputError):
        x86quant.quantize(model, [torch.randn(4, 17)])


class Inverse(nn.Module):
    """Fails in a step of torch's, for some values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.fc(x))


@pytest.mark.usefixtures("as_in_use")
def test_errors_of_torchs_steps_keep_their_place_and_print_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    calls = [torch.randn(8, 8) for _ in range(3)]
    fast = x86quant.quantize(Inverse().eval(), calls, speed_check=False, progress=False)
    with pytest.raises(torch.linalg.LinAlgError, match="singular") as raised:
        fast(torch.zeros(8, 8))
    assert any("eval_with_key" in str(entry.path) for entry in raised.traceback)
    assert capfd.readouterr().err == ""
