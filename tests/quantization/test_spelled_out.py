"""Functions of one tensor become tables however they are spelled."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import x86quant
from x86quant.lowering.graph_tools import is_op, op_name

SPELLED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "hard swish": (
        F.hardswish,
        lambda x: x * F.relu6(x + 3.0) / 6.0,
        lambda x: x * (F.relu6(x + 3) / 6),
        lambda x: x * torch.clamp(x + 3, 0, 6) * (1 / 6),
        lambda x: x * F.hardsigmoid(x),
        lambda x: x.add(3).clamp(0, 6).div(6).mul(x),
    ),
    "GELU": (
        F.gelu,
        lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))),
    ),
    "SiLU": (F.silu, lambda x: x * torch.sigmoid(x), lambda x: x / (1 + torch.exp(-x))),
    "Mish": (F.mish, lambda x: x * torch.tanh(F.softplus(x))),
}


class Net(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 3)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.act(self.b(self.act(self.a(x)))))


def quantized(model: nn.Module, *x: torch.Tensor, **more: object) -> nn.Module:
    return x86quant.quantize(model, [x, x], speed_check=False, progress=False, **more)


def made(act: Callable[[torch.Tensor], torch.Tensor]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net(act).eval(), torch.randn(4, 3, 20, 20)


@torch.no_grad()
@pytest.mark.parametrize("name", SPELLED)
def test_all_spellings_are_alike(name: str) -> None:
    first, *others = SPELLED[name]
    model, x = made(first)
    expected = quantized(model, x)(x)
    signal = expected.square().mean()
    for act in others:
        model, x = made(act)
        ours = quantized(model, x)
        steps = [op_name(n) for n in ours.graph_module.graph.nodes if is_op(n)]
        assert not ours.float_nodes
        assert steps == ["quantize", "conv", "conv", "conv_real"]
        assert float((ours(x) - expected).square().mean()) < 1e-3 * float(signal)


@torch.no_grad()
def test_what_others_read_is_a_step_of_its_own() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            gate = F.relu6(y + 3.0)
            return self.c(self.b(y * gate)) + self.c(self.b(gate))

    torch.manual_seed(0)
    model, x = Twice(F.relu).eval(), torch.randn(4, 3, 20, 20)
    exact, found = model(x), quantized(model, x)(x)
    assert float(10 * torch.log10(exact.square().mean() / (exact - found).square().mean())) > 25


@torch.no_grad()
@pytest.mark.parametrize("kept", ["mul", "a", "b"])
def test_layers_around_it_may_stay_in_float(kept: str) -> None:
    model, x = made(lambda x: x * F.relu6(x + 3.0))
    ours = quantized(model, x, float_layers=[kept])
    exact = model(x)
    assert ours.quantization.float_layers
    noise = 10 * torch.log10(exact.square().mean() / (exact - ours(x)).square().mean())
    assert float(noise) > 28


@torch.no_grad()
def test_a_formula_of_two_tensors_is_none() -> None:
    class Gate(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.c(self.b(y * torch.sigmoid(y.mean((2, 3), keepdim=True))))

    torch.manual_seed(0)
    model, x = Gate(F.relu).eval(), torch.randn(4, 3, 20, 20)
    ours = quantized(model, x)
    assert any(is_op(n, "mul") for n in ours.graph_module.graph.nodes)
