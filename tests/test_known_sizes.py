"""Numbers that code counts with while it is traced: only those that no input changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import x86quant
from x86quant.errors import UnsupportedError, X86QuantWarning
from x86quant.quantization.batches import Call
from x86quant.quantization.tracing import by_fx

Function = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A linear layer and what ``function`` does with it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 8)
        self.register_buffer("rows", torch.randn(5, 6))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def by_columns(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x)
    return torch.stack([y[:, i] * i for i in range(y.shape[1])], 1)


def by_groups(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x).view(x.shape[0], -1, 2)
    return sum(y[:, i] for i in range(int(y.size(1))))  # type: ignore[return-value]


def by_rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x)
    return torch.stack([y[i] * i for i in range(y.shape[0])])


def by_features(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Nothing has said yet how many there must be."""
    count = len(range(x.shape[1]))
    return model.linear(x) * count


def by_part_of_rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x).flatten()
    return torch.stack([y[i] for i in range(y.shape[0] // 8)])


@pytest.mark.parametrize("function", [by_columns, by_groups])
@pytest.mark.parametrize("example", [1, 2, 7])
def test_a_size_that_no_input_changes_is_a_number(function: Function, example: int) -> None:
    model = Model(function).eval()
    traced = by_fx(model, Call((torch.randn(example, 6),)))
    for rows in (1, 2, 7, 30):
        x = torch.randn(rows, 6)
        assert torch.equal(traced(x), model(x))
    with pytest.raises(UnsupportedError, match=r"do not meet s\[0\]\[1\] == 6"):
        traced(torch.randn(2, 5))


@pytest.mark.parametrize("function", [by_rows, by_features, by_part_of_rows])
def test_a_size_that_an_input_changes_is_none(function: Function) -> None:
    for example in (1, 5, 8):
        with pytest.raises(UnsupportedError, match="is a number that depends on the input"):
            by_fx(Model(function).eval(), Call((torch.randn(example, 6),)))


def test_what_the_example_decided_is_a_condition() -> None:
    def rows_of_the_sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model.linear(x + model.rows)  # x has as many rows, or one
        return y * len(range(x.shape[0]))

    model = Model(rows_of_the_sum).eval()
    traced = by_fx(model, Call((torch.randn(5, 6),)))
    x = torch.randn(5, 6)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(UnsupportedError, match=r"do not meet .*s\[0\]\[0\]"):
        traced(torch.randn(1, 6))
    ours = x86quant.quantize(model, [torch.randn(5, 6)] * 3, speed_check=False, progress=False)
    one = torch.randn(1, 6)
    with torch.no_grad(), pytest.warns(X86QuantWarning, match="a call runs in float"):
        assert torch.equal(ours(one), model(one))  # in float
