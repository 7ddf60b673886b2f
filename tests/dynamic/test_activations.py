"""Activations behind int8 linears: what other code reads of either is what the float model has."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from x86quant.dynamic import DynamicLinear, to_dynamic


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float(10 * torch.log10(exact.square().mean() / (exact - found).square().mean()))


class Mlp(nn.Module):
    def __init__(self, container: bool) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(64, 64), nn.ReLU()
        self.both = nn.Sequential(self.fc, self.act) if container else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x)) if self.both is None else self.both(x)


class OwnFeedForward(nn.TransformerEncoderLayer):
    """With a norm between a linear and the activation that stock's code has behind it."""

    def __init__(self) -> None:
        super().__init__(64, 4, 128, batch_first=True, norm_first=True)
        self.mid = nn.LayerNorm(128)

    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.activation(self.mid(self.linear1(x))))


class Outer(nn.Module):
    """A model whose ``body`` uses the parts of an inner module."""

    def __init__(self, container: bool, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.mlp, self.out, self.norm = Mlp(container), nn.Linear(64, 64), nn.LayerNorm(64)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


@pytest.mark.parametrize("container", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        lambda self, x: self.norm(self.mlp(self.mlp.fc(x))),
        lambda self, x: self.norm(self.mlp.act(self.out(self.mlp(x)))),
        lambda self, x: self.norm(self.mlp.fc(self.mlp(x))),
    ],
)
def test_parts_that_other_code_reads(container: bool, body: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = Outer(container, body).eval()
    x = torch.randn(4, 16, 64)
    with torch.no_grad():
        assert decibels(model(x), to_dynamic(model)(x)) > 35


@torch.no_grad()
def test_a_subclass_that_computes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    # On its fast path torch itself would compute what the base class does.
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    torch.manual_seed(0)
    model, x = OwnFeedForward().eval(), torch.randn(4, 16, 64)
    assert decibels(model(x), to_dynamic(model)(x)) > 40


@torch.no_grad()
def test_a_sequence_is_computed_as_one_and_read_layer_by_layer() -> None:
    torch.manual_seed(0)
    real = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8), nn.Tanh()).eval()
    ours, x = to_dynamic(real), torch.randn(5, 16)
    by_hand = x
    for layer in ours:
        by_hand = layer(by_hand)
    assert torch.equal(ours(x), by_hand)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(x), by_hand)
    assert bool((ours[0](x) < 0).any())
    seen = []
    ours[1].register_forward_hook(lambda module, given, result: seen.append(given[0]))
    assert torch.equal(ours(x), by_hand)
    assert bool((seen[0] < 0).any())


@torch.no_grad()
def test_a_sequence_leaves_the_relu_to_the_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = to_dynamic(nn.Sequential(nn.Linear(16, 32), nn.ReLU()).eval())
    asked = []
    plain = DynamicLinear.activated

    def activated(self: DynamicLinear, x: torch.Tensor, activation: str | None) -> torch.Tensor:
        asked.append(activation)
        return plain(self, x, activation)

    monkeypatch.setattr(DynamicLinear, "activated", activated)
    ours(torch.randn(5, 16))
    assert asked == ["relu"]


@torch.no_grad()
def test_another_activation_is_packed_for_itself() -> None:
    linear = to_dynamic(nn.Linear(16, 32).eval())
    x = torch.randn(5, 16)
    plain = linear(x)
    assert torch.equal(linear.activated(x, "relu"), plain.relu())
    linear.bias.add_(1)
    assert torch.equal(linear.activated(x, "relu"), linear(x).relu())
    assert torch.allclose(linear(x), plain + 1, atol=1e-5)
