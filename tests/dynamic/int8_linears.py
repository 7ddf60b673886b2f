"""Int8 linears on float tensors, and what they are held to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from x86quant.dynamic import (
    DynamicLinear,
    Int8Linear,
)
from x86quant.ops.dynamic import ACTIVATIONS
from x86quant.ops.dynamic import linear_dynamic as reference

INF, NAN = float("inf"), float("nan")


def layer(
    in_features: int, out_features: int, activation: str | None = None, seed: int = 0
) -> DynamicLinear:
    """A linear of full-range weights."""
    make = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (out_features, in_features), generator=make)
    scale = torch.rand(out_features, generator=make) / 100
    bias = torch.randn(out_features, generator=make)
    return DynamicLinear(weight.to(torch.int8), scale, bias, activation)


def expected(linear: Int8Linear, x: torch.Tensor, activation: str | None = None) -> torch.Tensor:
    return reference(x, linear.int8_weight, linear.weight_scale, linear.bias, activation)


def check(linear: DynamicLinear, x: torch.Tensor) -> None:
    """Bit for bit without an activation; the stated error with one."""
    plain = expected(linear, x)
    got = linear(x)
    if linear.activation is None:
        assert torch.equal(got, plain)
        return
    error = (got - ACTIVATIONS[linear.activation](plain)).abs()
    assert bool((error <= 1e-6 * (1 + plain.abs())).all())


def weight_only_is_close(linear: Int8Linear, x: torch.Tensor) -> None:
    """``linear_weight_only`` of these weights is the linear of their real values."""
    operands = (linear.int8_weight, linear.weight_scale, linear.bias)
    got = torch.ops.x86quant.linear_weight_only(x, *operands, "gelu")
    weight = linear.int8_weight.double() * linear.weight_scale.double()[:, None]
    want = F.gelu(F.linear(x.double(), weight, linear.bias.double()))
    reach = F.linear(x.abs().double(), weight.abs())
    assert bool(((got - want).abs() <= 1e-6 * (1 + reach)).all())


def close(ours: nn.Module, real: nn.Module, *inputs: Any, **more: Any) -> None:
    with torch.no_grad():
        want, got = real(*inputs, **more), ours(*inputs, **more)
    keep = ~want.isnan()
    assert (got - want)[keep].abs().max() < 0.1
    assert (got - want)[keep].square().mean() < 1e-3 * want[keep].square().mean()
