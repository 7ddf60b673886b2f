"""Ops on weights with scales for groups of features: fake results, kernels, bad operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import x86quant
from tests.row_samples import CODES_OF_X, NORM, SAMPLES, floats
from x86quant.dynamic.group_weights import quantize_groups
from x86quant.errors import InvalidInputError
from x86quant.ops.dynamic import linear_dynamic

OPS: Any = torch.ops.x86quant

CODES, SCALES = quantize_groups(floats(7, 16), 4, 8)
WEIGHT = {"weight": CODES, "weight_scale": SCALES, "bias": floats(7)}
GATED = {f"{part}_{name}": x for part in ("gate", "up") for name, x in zip(
    ("weight", "scale", "bias"), WEIGHT.values(), strict=True)}  # fmt: skip
OF_GROUPS: dict[str, dict[str, Any]] = {
    "linear_dynamic": {"x": floats(3, 5, 16), **WEIGHT, "activation": "gelu"},
    "linear_weight_only": {"x": floats(3, 5, 16), **WEIGHT, "activation": None},
    "linear_rows": {**CODES_OF_X, **WEIGHT, "activation": None},
    "linear_rows_rows": {**CODES_OF_X, **WEIGHT, "activation": "relu"},
    "linear_rows_norm": {**CODES_OF_X, **WEIGHT, "residual": floats(3, 5, 7), **NORM},
    "gated_rows_rows": {**CODES_OF_X, **GATED, "activation": "silu"},
    "linear_real": {**SAMPLES["linear_real"], **WEIGHT},
}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, (), OF_GROUPS[name])


@pytest.mark.parametrize("kernel", ["native", "reference"])
@pytest.mark.parametrize("offsets", [False, True])
def test_each_kernel_gives_the_bytes_of_the_definition(kernel: str, offsets: bool) -> None:
    weight, scale = quantize_groups(floats(33, 64), 4, 32)
    if offsets:
        scale = torch.stack([scale, floats(33, 2).half()], -1)
    x, bias = floats(9, 64) + 0.5, floats(33)
    x[4] = torch.nan
    layer = x86quant.DynamicLinear(weight, scale, bias)
    with x86quant.override(kernel, op="linear", dynamic=True):
        layer.pack_again()
        found = layer(x)
        assert {choice.kernel for _, choice in layer.choices} == {kernel}
    want = linear_dynamic(x, weight, scale, bias)
    assert torch.equal(found.nan_to_num(9e9), want.nan_to_num(9e9))


def test_stock_kernels_say_why_not() -> None:
    layer = x86quant.DynamicLinear(CODES, SCALES)
    said = str(dict(layer.choices[0][1].passed_over))
    assert "4 bits with scales for groups of features are not supported" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": CODES.to(torch.int16)}, "must be int8"),
        ({"weight_scale": torch.ones(7, 3)}, "3 groups do not divide 16"),
        ({"weight_scale": torch.ones(7, 4)}, "4 groups do not divide 16"),  # of 4 features
        ({"weight_scale": torch.ones(6, 2)}, "scales of groups must be"),
        ({"weight_scale": torch.ones(7, 2, 3)}, "scales of groups must be"),
        ({"weight_scale": torch.ones(7, 2, dtype=torch.float64)}, "scales of groups must be"),
        ({"bias": torch.ones(6)}, "bias must be"),
        ({"x": floats(3, 8)}, "expected 16 input features"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        OPS.linear_dynamic(**{**OF_GROUPS["linear_dynamic"], **change})
