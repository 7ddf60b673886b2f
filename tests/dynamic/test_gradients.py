"""A gradient that int8 layers cannot give is refused in a sentence, not lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import x86quant

CASES: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "linear": (nn.Linear(16, 4), (torch.randn(3, 16),)),
    "lstm": (nn.LSTM(16, 256), (torch.randn(5, 3, 16),)),
    "gru": (nn.GRU(16, 256), (torch.randn(5, 3, 16),)),
    "lstm cell": (nn.LSTMCell(16, 256), (torch.randn(3, 16),)),
    "gru cell": (nn.GRUCell(16, 256), (torch.randn(3, 16),)),
    "attention": (nn.MultiheadAttention(16, 2), (torch.randn(3, 5, 16),) * 3),
}


def first(result: Any) -> torch.Tensor:
    return first(result[0]) if isinstance(result, tuple) else result


def refused(module: nn.Module, *inputs: torch.Tensor) -> None:
    asked = [x.clone().requires_grad_() for x in inputs]
    result = first(module(*asked))
    with torch.no_grad():
        assert torch.equal(result, first(module(*inputs)))
    with pytest.raises(x86quant.UnsupportedError, match="no gradient flows through"):
        result.sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_of_dynamic_layers(name: str) -> None:
    module, inputs = CASES[name]
    refused(x86quant.to_dynamic(module.eval()), *inputs)


def test_of_int8_weights_alone() -> None:
    refused(x86quant.to_dynamic(nn.Linear(16, 4).eval(), weight_only=True), torch.randn(3, 16))


def test_of_a_compiled_model() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 50)).eval()
    x = torch.randn(16, 3, 9, 9)
    ours = x86quant.quantize(net, [(x,)], speed_check=False, progress=False)
    refused(ours, x)
    assert not ours(x).requires_grad
    with torch.no_grad():
        assert not ours(x.requires_grad_()).requires_grad


def test_layers_behind_are_trained() -> None:
    body, head = x86quant.to_dynamic(nn.Linear(16, 4).eval()), nn.Linear(4, 2)
    head(body(torch.randn(3, 16))).sum().backward()
    assert head.weight.grad is not None
