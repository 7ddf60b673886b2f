"""What int8 linears and attentions answer to the modules around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.dynamic.int8_linears import close
from x86quant.dynamic import (
    DynamicLinear,
    Int8Linear,
    to_dynamic,
)
from x86quant.errors import InvalidInputError


def test_a_linear_answers_as_the_float_one_did() -> None:
    real = nn.Linear(12, 7)
    real.note = "mine"  # type: ignore[assignment]
    ours = to_dynamic(real)
    weight = ours.weight
    assert (weight.dtype, weight.shape, weight.device) == (
        torch.float32,
        (7, 12),
        real.weight.device,
    )
    assert weight.is_floating_point()
    assert (ours.in_features, ours.out_features, ours.note) == (12, 7, "mine")
    assert torch.equal(torch.ones(2, 12, dtype=torch.float64).to(weight.dtype), torch.ones(2, 12))
    assert "weight" not in dict(ours.named_buffers())
    step = ours.weight_scale[:, None] * 0.5001
    for read in (weight, weight.data, weight.detach(), copy.deepcopy(weight), weight.t().t()):
        assert bool(((read - real.weight).abs() <= step).all())
    assert torch.tensor(weight.tolist()).equal(torch.from_numpy(weight.numpy()))


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.weight.zero_(),
        lambda layer: layer.weight.data.mul_(2),
        lambda layer: nn.init.ones_(layer.weight),
        lambda layer: layer.weight.__setitem__(0, 1.0),
        lambda layer: layer.weight.view(-1).chunk(2)[0].zero_(),
        lambda layer: setattr(layer.weight, "data", torch.zeros(7, 12)),
    ],
)
def test_a_write_to_a_weight_on_demand_is_refused(write: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(InvalidInputError, match="cannot be written to"):
        write(to_dynamic(nn.Linear(12, 7)))


class Casting(nn.Module):
    """Casts its input to the dtype of a weight, as T5 and Whisper do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


@pytest.mark.parametrize("weight_only", [True, False])
def test_a_parent_that_casts_to_the_weights_dtype(weight_only: bool) -> None:
    torch.manual_seed(0)
    real, x = Casting().eval(), torch.randn(5, 12)
    ours = to_dynamic(real, weight_only=weight_only)
    close(ours, real, x)
    program = torch.export.export(ours, (x,), strict=False)
    assert torch.equal(program.module()(x), ours(x))
    op = "linear_weight_only" if weight_only else "linear_dynamic"
    assert f"x86quant.{op}" in program.graph_module.code
    assert torch.equal(torch.fx.symbolic_trace(ours)(x), ours(x))


class Reading(nn.Module):
    """Computes with the weights of its layers instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(12, 7), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias) + x @ self.other.weight.t()


def test_a_parent_that_reads_weights() -> None:
    torch.manual_seed(0)
    real, x = Reading().eval(), torch.randn(5, 12)
    ours = to_dynamic(real)
    close(ours, real, x)
    with torch.profiler.profile() as seen:
        ours(x)
    assert "x86quant::linear_dynamic" in {event.key for event in seen.key_averages()}


def test_a_float_attention_by_the_weights_of_ours() -> None:
    torch.manual_seed(0)
    real, x = nn.MultiheadAttention(32, 4).eval(), torch.randn(7, 2, 32)
    ours = to_dynamic(real)
    with torch.no_grad():
        got, _ = F.multi_head_attention_forward(
            x, x, x, ours.embed_dim, ours.num_heads, ours.in_proj_weight, ours.in_proj_bias,
            ours.bias_k, ours.bias_v, ours.add_zero_attn, 0.0, ours.out_proj.weight,
            ours.out_proj.bias, training=False,
        )  # fmt: skip
        want, _ = real(x, x, x)
    assert (got - want).abs().max() < 0.02
    assert (ours.kdim, ours.vdim, ours.head_dim) == (32, 32, 8)


def test_a_plain_subclass_of_linear_is_int8() -> None:
    class Named(nn.Linear):
        """Nothing but a name."""

    kinds = [Named(4, 4), nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4)]
    assert [type(layer) for layer in to_dynamic(nn.Sequential(*kinds))] == [DynamicLinear] * 2


@pytest.mark.parametrize("weight_only", [True, False])
def test_the_linear_that_hugging_face_calls_conv1d(weight_only: bool) -> None:
    kind = type(
        "Conv1D",
        (nn.Module,),
        {
            "__module__": "transformers.pytorch_utils",
            "forward": lambda self, x: x @ self.weight + self.bias,
        },
    )
    torch.manual_seed(0)
    real = kind()
    real.nf, real.nx = 7, 12
    real.weight, real.bias = nn.Parameter(torch.randn(12, 7)), nn.Parameter(torch.randn(7))
    ours = to_dynamic(real, weight_only=weight_only)
    assert isinstance(ours, Int8Linear)
    assert (ours.nf, ours.nx, ours.weight.shape) == (7, 12, (12, 7))
    x = torch.randn(2, 5, 12)
    close(ours, real, x)
    with torch.no_grad():
        assert torch.allclose(torch.addmm(ours.bias, x[0], ours.weight), real(x[0]), atol=0.1)
