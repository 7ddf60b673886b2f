"""Which tensors a graph holds for: held against sizes one by one, and as torch.export says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from x86quant.forms.guard import Guard, GuardedInput, guard_of


def holds(guard: Guard, *shapes: tuple[int, ...]) -> bool:
    return guard.refusal([torch.zeros(shape) for shape in shapes]) is None


@pytest.mark.parametrize(
    ("single", "fits"),
    [
        (None, lambda rows, columns: True),
        (frozenset(), lambda rows, columns: rows > 1 and columns > 1),
        (frozenset({0}), lambda rows, columns: rows > 0 and columns > 1),
        (frozenset({0, 1}), lambda rows, columns: rows > 0 and columns > 0),
    ],
)
def test_sizes_of_one_and_none(
    single: frozenset[int] | None, fits: Callable[[int, int], bool]
) -> None:
    """One is taken where it was verified; none is not, as soon as there is any doubt."""
    guard = Guard((GuardedInput("x", torch.float32, 2, (), single),))
    for shape in itertools.product(range(4), repeat=2):
        assert holds(guard, shape) == fits(*shape), shape
    # What is fixed is that size, whatever was verified.
    for size, rows, columns in itertools.product((0, 1), range(4), range(4)):
        guard = Guard((GuardedInput("x", torch.float32, 2, ((1, size),), single),))
        assert holds(guard, (rows, columns)) == (columns == size and fits(rows, 2))


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.zeros(2, 3).double(), "x is torch.float64, not torch.float32"),
        (torch.zeros(2), "x has 1 dimensions, not 2"),
        (torch.zeros(2, 3).to_sparse(), "x is not a dense tensor on the CPU"),
        (torch.zeros(2, 3, device="meta"), "x is not a dense tensor on the CPU"),
        (torch.zeros(2, 4), "x has size 4 in dimension 1, not 3"),
        (torch.zeros(1, 3), "x has size 1 in dimension 0"),
    ],
)
def test_it_says_why_not(x: torch.Tensor, why: str) -> None:
    spec = GuardedInput("x", torch.float32, 2, ((1, 3),), frozenset())
    assert spec.refusal(x) == why
    assert spec.refusal(torch.zeros(2, 3)) is None


def test_it_asks_for_more_than_types_and_ranks() -> None:
    plain = GuardedInput("x", torch.float32, 2)
    assert Guard(()).is_trivial
    assert Guard((plain, plain)).is_trivial
    for more in (
        GuardedInput("x", torch.float32, 2, ((0, 1),)),
        GuardedInput("x", torch.float32, 2, (), frozenset()),
    ):
        assert not Guard((more,)).is_trivial
        assert not Guard((plain, more)).is_trivial
    condition: Any = (">=", ("size", 0, 0), 3)
    assert not Guard((plain,), (condition,)).is_trivial


def test_two_of_the_same_are_one_and_show_what_they_ask() -> None:
    one, other = (Guard((GuardedInput("x", torch.float32, 2),)) for _ in range(2))
    assert one.refusal([torch.zeros(1, 2)]) is None
    assert one == other
    assert hash(one) == hash(other)
    assert "x" in repr(one)
    assert "function" not in repr(one)
    assert "[" not in repr(one).replace("GuardedInput", "")


class Product(nn.Module):
    """Of matrices, and the sum of a vector's pairs."""

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        a, b, c = tensors
        return a @ b + c.reshape(-1, 2).sum()


@pytest.mark.parametrize("doubts_one", [False, True])
def test_of_a_program(doubts_one: bool) -> None:
    """Bounds, sizes that are one another's, sizes that follow from others, and fixed ones."""
    leaves = torch.zeros(5, 6), torch.zeros(6, 4), torch.zeros(12)
    rows, inner = Dim("rows", min=3, max=9), Dim("inner")
    program = export(
        Product(), leaves,
        dynamic_shapes={"tensors": ({0: rows, 1: inner}, {0: inner}, {0: 2 * inner})},
    )  # fmt: skip
    guard = guard_of(program, ["a", "b", "c"], leaves, doubts_one=doubts_one)
    assert [x.name for x in guard.inputs] == ["a", "b", "c"]
    assert [x.fixed for x in guard.inputs] == [(), ((1, 4),), ()]
    assert not guard.is_trivial
    for size in range(12):
        assert holds(guard, (size, 6), (6, 4), (12,)) == (3 <= size <= 9)
        right = size > 1 or (size == 0 and not doubts_one)  # torch.export itself rules one out
        assert holds(guard, (5, size), (size, 4), (2 * size,)) == right
        assert holds(guard, (5, 6), (size, 4), (12,)) == (size == 6)
        assert holds(guard, (5, 6), (6, size), (12,)) == (size == 4)
        assert holds(guard, (5, 6), (6, 4), (size + 4,)) == (size == 8)


@pytest.mark.parametrize(("least", "doubts_one"), [(2, False), (2, True), (3, True), (0, True)])
def test_the_bound_that_follows_from_no_one_is_left_out(least: int, doubts_one: bool) -> None:
    """It is the guard's own rule then, which the proof can loosen."""
    leaves = (torch.zeros(5, 6),)
    rows = Dim("rows", min=least) if least else Dim("rows")
    program = export(nn.Flatten(0), leaves, dynamic_shapes={"input": {0: rows}})
    guard = guard_of(program, ["x"], leaves, doubts_one=doubts_one)
    lower = [c for c in guard.conditions if c[0] == ">="]
    left_out = doubts_one and least <= 2
    assert lower == ([] if left_out or not least else [(">=", ("size", 0, 0), least)])
    assert guard.inputs[0].single == (frozenset() if doubts_one else None)
