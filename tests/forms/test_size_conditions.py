"""Conditions on sizes: read, printed, checked and held against sizes."""

from __future__ import annotations

import pickle

import pytest
import torch

from x86quant.errors import UnsupportedError
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.forms.size_conditions import (
    check,
    evaluator,
    excludes_one,
    holds,
    parse,
    renumbered,
    sizes_in,
    text,
)

#: What torch's tracers write, with a function of the sizes of two inputs that means the same.
WRITTEN = {
    "s[0][1] == 4": lambda a, b: a[1] == 4,
    "L['tensors'][1].size()[0] <= s[0][0]": lambda a, b: b[0] <= a[0],
    "2 <= L['leaves'][0].size()[1] < 9": lambda a, b: 2 <= a[1] < 9,
    "max(1, s[0][1] // 4)*min(2, s[1][0]) > 1": lambda a, b: max(1, a[1] // 4) * min(2, b[0]) > 1,
    "torch.sym_max(1, s[0][0]) != torch.sym_min(3, s[1][0])": lambda a, b: a[0] != min(3, b[0]),
    "not (s[0][0] % 3 == 1 or s[1][0] > 5)": lambda a, b: not (a[0] % 3 == 1 or b[0] > 5),
    "s[0][0]**2 - -s[1][0] >= 9 and s[0][1] != 5": lambda a, b: a[0] ** 2 + b[0] >= 9 and a[1] != 5,
}  # fmt: skip

SHAPES = [((a, b), (c,)) for a in (1, 2, 3, 7) for b in (1, 4, 5, 9) for c in (1, 2, 6)]


@pytest.mark.parametrize("code", WRITTEN)
def test_a_condition_means_what_its_code_means(code: str) -> None:
    condition = parse(code)
    hold = evaluator([condition])
    assert {WRITTEN[code](*shapes) for shapes in SHAPES} == {True, False}
    for shapes in SHAPES:
        assert hold(shapes) is holds(condition, shapes) is WRITTEN[code](*shapes)


@pytest.mark.parametrize("code", WRITTEN)
def test_what_is_printed_and_stored_reads_as_the_same(code: str) -> None:
    condition = parse(code)
    printed = text(condition, lambda number: f"s[{number}]")
    assert all(holds(parse(printed), x) == holds(condition, x) for x in SHAPES)
    assert check([list(condition)], 2) == (condition,)
    guard = Guard(tuple(GuardedInput(n, torch.float32, 2) for n in "ab"), (condition, condition))
    assert guard.conditions == (condition,)
    assert pickle.loads(pickle.dumps(guard)) == guard


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os')",
        "s[0][0].real",
        "exec(s)",
        "torch.load(s[0][0], s[0][1])",
        "s[0] == 1",
        "s[0][0]**99 == 1",
        "(" * 9,
    ],
)
def test_anything_else_is_refused(code: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be checked"):
        parse(code)


def test_a_guard_does_not_take_one_call_for_another() -> None:
    guard = Guard((GuardedInput("x", torch.float32, 2),), (parse("s[0][0] < 3"),))
    for rows in (2, 2, 3, 3, 2, 1, 4):
        assert (guard.refusal([torch.zeros(rows, 4)]) is None) == (rows < 3)


def test_what_has_no_meaning_at_some_sizes_does_not_hold() -> None:
    assert not holds(parse("s[0][0] % s[0][1] == 0"), [(4, 0)])
    assert not holds(parse("s[0][3] != 7"), [(4, 2)])


def test_inputs_can_be_left_out() -> None:
    condition = renumbered(parse("s[0][1] == s[2][1] + s[1][0]"), [0, 0, 1])
    assert condition == parse("s[0][1] == s[1][1] + s[0][0]")
    assert set(sizes_in(condition)) == {(0, 1), (1, 1), (0, 0)}


@pytest.mark.parametrize(
    ("code", "excludes"),
    [
        ("s[0][0] != 1", True), ("s[0][1] > 1", True), ("s[1][0] >= 2", True),
        ("s[0][0] != 2", False), ("s[0][0] > 2", False), ("s[0][0] >= 1", False),
        ("s[0][0] == 1", False), ("s[0][0] < 1", False), ("s[0][0] != s[0][1]", False),
        ("s[0][0] + s[0][1] > 1", False), ("s[0][0] % 8 != 1", False),
    ],
)  # fmt: skip
def test_what_asks_that_a_size_is_not_one(code: str, excludes: bool) -> None:
    assert excludes_one(parse(code)) == excludes


SIZE = ["size", 0, 0]


@pytest.mark.parametrize(
    ("conditions", "why"),
    [
        ({}, "conditions on sizes are no list"),
        ([1], "a condition on sizes is no list"),
        ([["=="]], "is not valid"),
        ([["==", SIZE, 1.5]], "is not valid"),
        ([["==", SIZE, True]], "is not valid"),
        ([["==", SIZE, "1"]], "is not valid"),
        ([["==", ["size", 0], 1]], "names no size"),
        ([["==", ["size", 0, 0, 0], 1]], "names no size"),
        ([["==", ["size", -1, 0], 1]], "names no size"),
        ([["==", ["size", 0, -1], 1]], "names no size"),
        ([["==", ["size", 0, True], 1]], "names no size"),
        ([["==", ["size", 0, "0"], 1]], "names no size"),
        ([["==", ["size", 2, 0], 1]], "is on input 2, and there are 2"),
        ([["exec", SIZE, 1]], "the unknown operator 'exec'"),
        ([[["=="], SIZE, 1]], "the unknown operator"),
        ([["==", SIZE, 1, 1]], "'==' of a condition has 3 operands"),
        ([["not", SIZE, 1]], "'not' of a condition has 2 operands"),
    ],
)
def test_what_is_read_from_files_is_checked(conditions: object, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        check(conditions, 2)
    assert check([["==", ["size", 1, 0], 1]] * 2, 2) == (("==", ("size", 1, 0), 1),)
