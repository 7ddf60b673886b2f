"""A layer that is the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import x86quant
from x86quant.errors import UnsupportedError

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


@torch.no_grad()
@pytest.mark.parametrize("mode", ["static", "auto"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_small_recurrent_layer_is_static(kind: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    layer = kind(256, 32, batch_first=True).eval()
    found = x86quant.quantize(layer, [_X, _X], mode=mode, speed_check=False, progress=False)
    assert found.quantization.mode == "static"
    for ours, exact in zip(leaves(found(_X)), leaves(layer(_X)), strict=True):
        assert float((ours - exact).square().mean() / exact.square().mean()) < 1e-3


@pytest.mark.parametrize(
    ("layer", "call", "what"),
    [
        (nn.RNN(8, 8), torch.randn(3, 2, 8), "no int8 form of RNN.*leave it in float"),
        (nn.Embedding(50, 8), torch.randint(50, (4,)), 'mode="weight_only"'),
        (nn.Bilinear(8, 8, 4), (torch.randn(4, 8), torch.randn(4, 8)), "leave it in float"),
    ],
)
def test_what_has_no_int8_form_says_what_to_do(layer: nn.Module, call: object, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        x86quant.quantize(layer, [call, call], progress=False)


def leaves(value: object) -> list[torch.Tensor]:
    """The tensors of a result."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def first_of(value: object) -> torch.Tensor:
    """The first tensor of a result."""
    while isinstance(value, tuple):
        value = value[0]
    assert isinstance(value, torch.Tensor)
    return value
