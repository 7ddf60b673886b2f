"""Recurrent layers stay whole where torch.export traces what is around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import x86quant
from tests.quantization.any_model import quantized, sqnr
from x86quant.calling.call import Call
from x86quant.quantization.tracing.tracing import by_export


class Listener(nn.Module):
    """Its code takes no stand-ins for tensors, so that torch.fx cannot trace it."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], bidirectional: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(8, 24, 3)
        self.memory = kind(24, 32, 2, batch_first=True, bidirectional=bidirectional)
        self.out = nn.Linear(64 if bidirectional else 32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"no tensor: {x!r}")
        return self.told(*self.memory(torch.relu(self.conv(x)).transpose(1, 2)))

    def told(self, heard: torch.Tensor, last: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out(heard), last[0][-1] if isinstance(last, tuple) else last[-1]


class ListeningTwice(Listener):
    """Goes on with what it kept in mind."""

    def told(self, heard: torch.Tensor, last: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().told(*self.memory(heard[..., :24], last))


def _sound(seed: int, length: int = 180) -> torch.Tensor:
    return torch.randn(2, 8, length, generator=torch.manual_seed(seed))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_graph_calls_the_layer(kind: Any, bidirectional: bool) -> None:
    model = ListeningTwice(kind, bidirectional).eval()
    traced = by_export(model, Call((_sound(0),)))
    layers = traced.graph_module.graph.find_nodes(op="call_module")
    assert [str(node.target) for node in layers] == ["conv", "memory", "memory", "out"]
    assert traced.graph_module.get_submodule("memory") is model.memory
    for x in (_sound(1), _sound(2, 90), torch.cat([_sound(3), _sound(4)])):
        found = traced.results.fill(traced.graph_module(x))
        for one, other in zip(found, model(x), strict=True):
            torch.testing.assert_close(one, other)


def test_such_a_model_is_one_static_graph(tmp_path: Any) -> None:
    model = Listener(nn.LSTM).eval()
    data = [_sound(seed) for seed in range(4)]
    int8 = quantized(model, data, mode="static", speed_check=False)
    assert int8.quantization.traced_by == {"": "torch.export"}
    assert not int8.quantization.float_layers
    other = _sound(9, 120)
    for one, exact in zip(int8(other), model(other), strict=True):
        assert sqnr(exact, one) > 25
    x86quant.save(int8, tmp_path / "listener.x86q")
    again = x86quant.load(tmp_path / "listener.x86q")
    assert all(map(torch.equal, again(other), int8(other)))


class Packing(nn.Module):
    """Its sequences have lengths of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory = nn.LSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = [x.shape[1], x.shape[1] - 2]
        heard, _ = self.memory(pack_padded_sequence(x, torch.tensor(lengths), batch_first=True))
        return self.out(pad_packed_sequence(heard, batch_first=True)[0])


def test_packed_sequences_are_as_before() -> None:
    data = [torch.randn(2, 12, 8) for _ in range(3)]
    model = Packing().eval()
    int8 = quantized(model, data, mode="dynamic", speed_check=False)
    assert sqnr(model(data[0]), int8(data[0])) > 25
