"""Calls at other sizes: which there are, and what they cost."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from x86quant.calling.call import Call
from x86quant.capture.variants import _of_other_sizes as of_other_sizes
from x86quant.capture.variants import (
    elements,
    halved,
    resized,
    shared_rows,
    smallest,
    takes,
    variants,
)
from x86quant.errors import X86QuantWarning


def call(*shapes: tuple[int, ...]) -> Call:
    """Of float tensors that count up."""
    made = [torch.arange(max(1, torch.Size(s).numel())) for s in shapes]
    return Call(tuple(x.float().reshape(s) for x, s in zip(made, shapes, strict=True)), {})


def shapes(found: Call) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in found.leaves]


def test_one_size_becomes_another() -> None:
    given = call((3, 4), (4, 3, 4))
    assert shapes(resized(given, 0, 3, 5)) == [(5, 4), (4, 3, 4)]
    assert shapes(resized(given, None, 4, 2)) == [(3, 2), (4, 3, 2)]  # but for the first
    assert shapes(resized(given, 2, 4, 1)) == [(3, 4), (4, 3, 1)]
    assert shapes(resized(given, None, 7, 1)) == shapes(given)
    (longer,) = resized(call((1, 3)), 1, 3, 7).leaves
    assert longer.tolist() == [[0, 1, 2, 0, 1, 2, 0]]  # what is longer begins anew


def test_rows_are_what_all_tensors_share() -> None:
    assert shared_rows(call((3, 4), (3,))) == 3
    assert shared_rows(call((3, 4), (2, 4))) == 0
    assert shared_rows(call((3, 4), ())) == 0
    assert shared_rows(call(())) == 0
    assert elements(call((3, 4), (2,))) == 14


def test_the_smallest_is_one_row_of_the_smallest() -> None:
    assert shapes(smallest([call((4, 9)), call((3, 5)), call((7, 6))])) == [(1, 5)]
    assert shapes(smallest([call((1, 5))])) == [(1, 5)]
    assert shapes(smallest([call((2, 6))])) == [(1, 6)]
    assert shapes(smallest([call((2, 5), (3, 5))])) == [(2, 5), (3, 5)]


def test_a_model_takes_what_it_runs_on_and_keeps_what_it_kept() -> None:
    model = nn.BatchNorm1d(4)
    assert model.running_mean is not None
    before = model.running_mean.clone()
    assert takes(model, call((3, 4)))
    assert not takes(model, call((3, 5)))
    assert torch.equal(model.running_mean, before)


def test_rows_and_other_sizes_are_tried() -> None:
    """Each once, those that fit into what all may have together: six times the call."""
    found = [shapes(x)[0] for x in variants([call((4, 6))])]
    assert found[0] == (4, 6)
    assert set(found) == {(4, 6), (1, 6), (2, 6), (5, 6), (2, 3), (2, 9), (2, 12), (2, 7), (2, 1)}
    assert len(found) == 9
    # Of one row, and of two: what is the same call is not made twice.
    assert [shapes(x)[0] for x in variants([call((1, 6))])][:3] == [(1, 6), (2, 6), (1, 3)]
    assert [shapes(x)[0] for x in variants([call((2, 6))])][:4] == [(2, 6), (1, 6), (3, 6), (2, 3)]
    few = variants([call((4, 6))], growth=1)
    assert sum(map(elements, few)) <= 2 * 24
    assert len(few) > 1
    first, second, last = (call((n, 6)) for n in (3, 4, 5))
    given = variants([first, second, call((9, 9)), last])
    assert given[:3] == (first, second, last)
    assert variants([first, second])[:2] == (first, second)


def test_a_size_that_several_dimensions_have_is_changed_together_and_alone() -> None:
    found = [shapes(x)[0] for x in variants([call((2, 6, 6))], growth=40)]
    assert {(2, 9, 9), (2, 9, 6), (2, 6, 9), (2, 1, 1), (2, 1, 6), (2, 6, 1)} <= set(found)


def test_tensors_without_rows_have_other_sizes_only() -> None:
    found = [shapes(x) for x in variants([call((3, 4), (2, 4))])]
    assert [(3, 6), (2, 6)] in found
    assert all([s[0] for s in one] == [3, 2] for one in found)


def test_other_sizes_of_a_large_call_are_those_of_a_smaller_one() -> None:
    large = call((2, 3, 128, 128))  # 98,304 elements
    found = [shapes(x)[0] for x in variants([large], lambda _: True)]
    assert found[0] == (2, 3, 128, 128)
    assert {(1, 3, 32, 32), (3, 3, 32, 32)} <= set(found)  # a quarter of each size
    assert (2, 3, 192, 32) in found  # what the size itself was, by half more, in one dimension
    assert sum(torch.Size(s).numel() for s in found[1:]) <= 1.5 * elements(large)
    # Half, where the model takes no quarter; no model is asked of a small call.
    asked: list[Call] = []

    def takes_halves(one: Call) -> bool:
        asked.append(one)
        return one.leaves[0].shape[-1] >= 64

    found = [shapes(x)[0] for x in variants([large], takes_halves)]
    assert (1, 3, 64, 64) in found
    assert not any(s[-1] == 32 for s in found)
    assert {x.leaves[0].shape[0] for x in asked} == {2}
    asked.clear()
    small = call((2, 3, 64, 64))
    assert [*map(str, variants([small], takes_halves))] == [*map(str, variants([small]))]
    assert not asked


def test_other_sizes_of_what_was_made_smaller() -> None:
    """Longer than they were by one dimension at a time; all at once by one more, and of one."""
    found = [shapes(x)[0] for x in of_other_sizes(call((2, 3, 32, 32)), {32: 128})]
    assert found == [
        (2, 1, 32, 32), (2, 4, 32, 32), (2, 6, 32, 32),
        (2, 3, 192, 32), (2, 3, 32, 192),
        (2, 4, 32, 32), (2, 3, 33, 33),
        (2, 3, 1, 1), (2, 1, 32, 32), (2, 3, 1, 32), (2, 3, 32, 1),
    ]  # fmt: skip
    found = [shapes(x)[0] for x in of_other_sizes(call((2, 32)), {32: 128})]
    assert found == [(2, 192), (2, 33), (2, 1)]
    found = [shapes(x)[0] for x in of_other_sizes(call((2, 32)), {})]
    assert found == [(2, 16), (2, 48), (2, 64), (2, 33), (2, 1)]


def test_half_of_a_large_call() -> None:
    assert shapes(halved(call((2, 3, 128, 128)), lambda _: True)) == [(2, 3, 64, 64)]
    assert shapes(halved(call((2, 3, 128, 128)), lambda _: False)) == [(2, 3, 128, 128)]
    assert shapes(halved(call((2, 3, 64, 64)), lambda _: True)) == [(2, 3, 64, 64)]
    # Never below 16, nor to a size that another dimension has.
    assert shapes(halved(call((2000, 31)), lambda _: True)) == [(2000, 31)]
    assert shapes(halved(call((20, 64, 32)), lambda _: True)) == [(20, 64, 16)]


def test_trying_sizes_warns_of_nothing() -> None:
    class Warns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            warnings.warn("a call runs in float", X86QuantWarning, stacklevel=1)
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert takes(Warns(), call((2, 3)))
