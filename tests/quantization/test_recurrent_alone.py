"""Recurrent layers by themselves: what tells that a static model would be no faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import x86quant
from x86quant.calling.call import Call
from x86quant.calling.state import deep_copy
from x86quant.quantization import speed, static_recurrent
from x86quant.quantization.recurrent_alone import recurrent_alone


class Twice(nn.Module):
    """Two recurrent modules, of which one is called twice."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first = kind(6, 8, 2, batch_first=True)
        self.second = kind(8, 8, bidirectional=True)
        self.head = nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.first(x)[0]
        for _ in range(2):
            y = self.head(self.second(y)[0])
        return y


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_they_are_run_on_what_the_model_gives_them(kind: Any) -> None:
    torch.manual_seed(0)
    model, x = Twice(kind).eval().requires_grad_(False), torch.rand(3, 5, 6) * 2 - 1
    before = deep_copy(model)
    alone = recurrent_alone(model, Call((x,)))
    assert alone is not None
    assert model.calls == 0
    assert [tuple(given.shape) for _, given in alone._runs] == [(3, 5, 6), (3, 5, 8), (3, 5, 8)]
    exact, found = model.first(x)[0], alone._runs[0][0](x)
    assert float((found - exact).norm() / exact.norm()) < 0.03
    assert alone(x) is None
    assert str(model) == str(before)
    assert torch.equal(model(x), before(x))


class Cell(nn.Module):
    """A cell, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.cell(x[0])
        return h


class Packed(nn.Module):
    """A layer that is given packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.rnn(pack_sequence([x[0], x[1]]))[1][0]
        return h


class Plain(nn.Module):
    """The recurrent layer that has no int8 form."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rnn(x)[0]
        return found


@pytest.mark.parametrize("kind", [Cell, Packed, Plain])
def test_of_others_nothing_is_known(kind: type[nn.Module]) -> None:
    assert recurrent_alone(kind(), Call((torch.zeros(2, 3, 4),))) is None


class Last(nn.Module):
    """The last state of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.rnn(x)[0][:, -1])
        return found


@pytest.mark.parametrize("gain", [None, 2.0])
def test_no_static_model_is_made_where_they_alone_take_as_long(
    gain: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "can_tell", lambda: True)
    monkeypatch.setattr(speed, "slower", lambda *_, **__: None)
    monkeypatch.setattr(static_recurrent, "gained", lambda *_: gain)
    prepared: list[Any] = []
    prepare = static_recurrent.prepare

    def noted(*arguments: Any) -> Any:
        prepared.append(prepare(*arguments))
        return prepared[-1]

    monkeypatch.setattr(static_recurrent, "prepare", noted)
    calls = [torch.randn(4, 5, 6) for _ in range(4)]
    x86quant.quantize(Last(), calls, progress=False)
    assert len(prepared) == (0 if gain is None else 1)
