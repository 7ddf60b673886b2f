"""Linears on float tensors: their numbers, at every ISA level."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import isa
from tests.dynamic.int8_linears import INF, NAN, check, expected, layer
from x86quant.dynamic import (
    DynamicLinear,
    Int8Linear,
    WeightOnlyLinear,
)
from x86quant.errors import InvalidInputError
from x86quant.ops.dynamic import ACTIVATIONS


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 100)),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_reference(
    rows: int, sizes: tuple[int, int], activation: str | None, seed: int
) -> None:
    torch.manual_seed(seed)
    check(layer(*sizes, activation, seed), torch.randn(rows, sizes[0]) * 3)


AT_A_LEVEL = """
import torch, x86quant
from tests.dynamic.int8_linears import check, layer, weight_only_is_close
from tests.dynamic.test_linear_numerics import saturating

assert x86quant.cpu().isa == {level!r}
torch.manual_seed(0)
for inputs, outputs in ((1, 1), (3, 5), (64, 32), (100, 33), (257, 70), (768, 64)):
    for rows in (1, 2, 5, 16, 17, 33, 64):
        for activation in (None, "gelu"):
            linear = layer(inputs, outputs, activation)
            check(linear, torch.randn(rows, inputs) * 5)
            assert {{c.kernel for _, c in linear.choices}} == {{"native"}}
for linear, x in saturating():
    check(linear, x)
for inputs, outputs in ((1, 1), (3, 5), (64, 32), (100, 33), (257, 70)):
    for rows in (1, 2, 3, 4, 5, 16, 17):
        weight_only_is_close(layer(inputs, outputs, "gelu"), torch.randn(rows, inputs))
x = torch.randn(5, 100)
x[1, 3], x[2, 99], x[3] = float("nan"), float("-inf"), 0
y = layer(100, 33)(x)
assert y[1:3].isnan().all() and not y[[0, 3, 4]].isnan().any()
print("done")
"""


def saturating() -> list[tuple[DynamicLinear, torch.Tensor]]:
    """Products of the largest codes and weights, all of one sign: 16 bits cannot hold a pair."""
    found = []
    for weight in (127, -128):
        for rows in (1, 7, 40):
            codes = torch.full((37, 130), weight, dtype=torch.int8)
            x = torch.full((rows, 130), 2.0)
            found.append((DynamicLinear(codes, torch.full((37,), 0.01)), x))
    return found


@pytest.mark.parametrize("level", isa.LEVELS)
def test_every_isa_level_equals_the_reference(level: str) -> None:
    if not isa.has(level):
        pytest.skip(f"this CPU has no {level}")
    run = subprocess.run(
        [sys.executable, "-c", AT_A_LEVEL.format(level=level)],
        env=isa.environment(level),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "done\n", run.stderr


def test_saturating_sums_are_the_exact_ones() -> None:
    for linear, x in saturating():
        total = 255 * 130 * int(linear.int8_weight[0, 0])
        one = torch.tensor(float(total)) * (torch.tensor(2.0) / 255 * linear.weight_scale[0])
        assert torch.equal(linear(x), one.expand(len(x), 37))


def test_a_row_does_not_see_the_others() -> None:
    linear, x = layer(50, 20), torch.randn(6, 50) * torch.tensor([[1.0, 100, 1e-3, 1, 1e6, 7]]).T
    together = linear(x)
    assert torch.equal(together, torch.cat([linear(row) for row in x.split(1)]))


def test_a_row_without_a_finite_range_is_nan_and_alone() -> None:
    linear = layer(20, 6, "relu")
    x = torch.randn(6, 20)
    want = linear(x)
    for row, value in ((1, NAN), (3, INF), (4, -INF)):
        x[row, 7] = value
    got = linear(x)
    assert bool(got[[1, 3, 4]].isnan().all())
    assert torch.equal(got[[0, 2, 5]], want[[0, 2, 5]])
    assert torch.equal(got.isnan(), expected(linear, x, "relu").isnan())


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-44, 1e-38, 3e38, -3e38])
def test_constant_rows(value: float) -> None:
    linear = layer(20, 6)
    check(linear, torch.full((2, 20), value))
    if abs(value) < 1e-37:
        assert torch.allclose(linear(torch.full((1, 20), value)), linear.bias)


def test_a_range_wider_than_float32_is_kept() -> None:
    x = torch.tensor([[3e38, -3e38, 0.0, 1e38]])
    linear = DynamicLinear(torch.eye(4, dtype=torch.int8), torch.full((4,), 1e-10))
    assert torch.allclose(linear(x), x * 1e-10, atol=1.3e26)
    check(linear, x)


def strided() -> dict[str, torch.Tensor]:
    base = torch.randn(12, 40)
    return {
        "every second row": base[::2, :20],
        "every second column": base[:, ::2],
        "transposed": torch.randn(20, 12).t(),
        "one row for all": base[:1, :20].expand(5, 20),
        "one value for all": torch.ones(1, 1).expand(4, 20),
        "rank 3": torch.randn(3, 4, 20).transpose(0, 1),
        "rank 4": torch.randn(2, 3, 2, 20),
        "a vector": base[0, :20],
        "not aligned": torch.randn(61)[1:].view(3, 20),
        "flipped": base[:, :20].flip(0),
    }


@pytest.mark.parametrize("name", strided())
def test_any_strides(name: str) -> None:
    x, linear = strided()[name], layer(20, 9)
    got = linear(x)
    assert got.is_contiguous()
    assert got.shape == (*x.shape[:-1], 9)
    assert torch.equal(got, expected(linear, x.contiguous()))


@pytest.mark.parametrize("shape", [(0, 20), (2, 0, 20), (0, 3, 20)])
def test_empty_batches(shape: tuple[int, ...]) -> None:
    assert layer(20, 9)(torch.zeros(shape)).shape == (*shape[:-1], 9)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_empty_weights_run_on_the_reference(sizes: tuple[int, int]) -> None:
    linear = layer(*sizes)
    assert [choice.kernel for _, choice in linear.choices] == ["reference"]
    got = linear(torch.zeros(2, sizes[0]))
    assert torch.equal(got, linear.bias.expand(2, -1))


def test_sums_beyond_int32_run_on_the_reference() -> None:
    linear = DynamicLinear(torch.full((1, 70_000), 127, dtype=torch.int8), torch.ones(1))
    assert linear.choices[-1][1].kernel == "reference"
    check(linear, torch.ones(2, 70_000))
    assert linear(torch.full((1, 70_000), 1.0)).item() == pytest.approx(70_000 * 127)


@pytest.mark.parametrize("kind", [DynamicLinear, WeightOnlyLinear])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 19), "expected 20 input features"),
        (torch.tensor(1.0), "expected 20 input features"),
        (torch.zeros(2, 20, dtype=torch.float64), "must be float32"),
        (torch.zeros(2, 20, dtype=torch.uint8), "must be float32"),
    ],
)
def test_bad_input_is_refused(kind: type[Int8Linear], x: torch.Tensor, message: str) -> None:
    linear = kind.from_float(nn.Linear(20, 9))
    with pytest.raises(InvalidInputError, match=message):
        linear(x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"int8_weight": torch.zeros(9, 20)}, "weight must be int8"),
        ({"int8_weight": torch.zeros(9, 20, 1, dtype=torch.int8)}, "of shape"),
        ({"weight_scale": torch.ones(8)}, r"weight_scale must be float32 of shape \(9,\)"),
        ({"weight_scale": torch.ones(9).half()}, "weight_scale must be float32"),
        ({"bias": torch.ones(1)}, "bias must be float32"),
        ({"activation": "elu"}, "unknown activation 'elu'"),
    ],
)
def test_bad_weights_are_refused(changes: dict[str, Any], message: str) -> None:
    good = {
        "int8_weight": torch.zeros(9, 20, dtype=torch.int8),
        "weight_scale": torch.ones(9),
        "bias": torch.zeros(9),
        "activation": None,
    }
    with pytest.raises(InvalidInputError, match=message):
        DynamicLinear(**{**good, **changes})(torch.zeros(2, 20))


def test_a_float_weight_that_is_not_finite_is_refused() -> None:
    linear = nn.Linear(4, 4)
    linear.weight.data[1, 2] = NAN
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        DynamicLinear.from_float(linear)


def test_layers_of_other_float_types_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"bfloat16, expected float32; call model.float"):
        DynamicLinear.from_float(nn.Linear(4, 4).bfloat16())
