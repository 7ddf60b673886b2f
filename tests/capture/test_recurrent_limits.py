"""torch.export takes no recurrent layer in float apart into more steps than anybody waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from x86quant.capture.exported import ops_from_export
from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import CallForm

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **given: nn.RNN(*sizes, nonlinearity="relu", **given),
}


class Steps(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[0]
        return out


def traced(layer: nn.RNNBase, x: torch.Tensor) -> None:
    model = Steps(layer).eval()
    form, leaves = CallForm.of(model, (x,), {})
    ops_from_export(model, form, leaves)


@pytest.mark.parametrize("kind", LAYERS)
def test_many_steps_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match="unrolled into more than 100 steps"):
        traced(LAYERS[kind](4, 4), torch.randn(101, 2, 4))


@pytest.mark.parametrize("batch_first", [False, True])
def test_layers_and_directions_count(batch_first: bool) -> None:
    layer = nn.LSTM(4, 4, num_layers=2, bidirectional=True, batch_first=batch_first)
    shape = (2, 26, 4) if batch_first else (26, 2, 4)
    with pytest.raises(UnsupportedError, match="unrolled"):
        traced(layer, torch.randn(shape))


def test_few_steps_are_traced() -> None:
    traced(nn.GRU(4, 4, batch_first=True), torch.randn(101, 3, 4))  # rows count for nothing
