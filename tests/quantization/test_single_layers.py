"""A layer that is the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import x86quant

_X = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(0))
_LAYERS = {
    "linear": (lambda: nn.Linear(256, 64), (_X,)),
    "lstm": (lambda: nn.LSTM(256, 256, batch_first=True), (_X,)),
    "gru": (lambda: nn.GRU(256, 256), (_X, torch.zeros(1, 5, 256))),
    "cell": (lambda: nn.LSTMCell(256, 256), (_X[:, 0],)),
    "attention": (lambda: nn.MultiheadAttention(256, 4, batch_first=True), (_X, _X, _X)),
    "convolution": (lambda: nn.Conv1d(5, 16, 3), (_X,)),
    "transposed": (lambda: nn.ConvTranspose1d(5, 16, 3), (_X,)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", _LAYERS)
def test_it_is_int8_and_the_one_that_was_given_is_not(name: str) -> None:
    torch.manual_seed(0)
    make, call = _LAYERS[name]
    layer = make().eval()
    before = copy.deepcopy(layer)
    found = x86quant.quantize(layer, [call, call], speed_check=False, progress=False)
    assert found is not layer
    ours, kept, floats = (first_of(one(*call)) for one in (found, layer, before))
    assert torch.equal(kept, floats)
    assert not torch.equal(ours, floats)
    noise = (ours - floats).square().mean() / floats.square().mean()
    assert float(noise) < 1e-3


def first_of(value: object) -> torch.Tensor:
    """The first tensor of a result."""
    while isinstance(value, tuple):
        value = value[0]
    assert isinstance(value, torch.Tensor)
    return value
