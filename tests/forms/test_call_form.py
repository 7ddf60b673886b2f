"""How calls are told apart: by what they mean, however they are spelled."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import CallForm, same_structure, take_apart

X, Y = torch.ones(2), torch.zeros(3)


class Net(nn.Module):
    def forward(
        self,
        x: Any,
        mask: Any = None,
        *more: Any,
        scale: float = 1.0,
        flag: bool = True,
        **rest: Any,
    ) -> Any:
        return x


#: Calls: positional arguments, keyword arguments.
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (([X, Y],), {}),
    (([X, (Y, 1.0)],), {}),
    (([X, (Y, 1)],), {}),
    (([X, [Y, 1.0]],), {}),
    (([X],), {}),
    (([],), {}),
    (([X, {"y": Y}],), {}),
    ((torch.Size([2]),), {}),
    ((X,), {}),
    ((X, None), {}),
    ((X,), {"mask": None}),
    ((X, Y), {}),
    ((X,), {"mask": Y}),
    ((), {"mask": Y, "x": X}),
    ((Y, X), {}),
    ((X,), {"scale": 1.0}),
    ((X,), {"scale": 1}),
    ((X,), {"scale": 2.0}),
    ((X,), {"scale": float("nan")}),
    ((X,), {"flag": 1}),
    ((X,), {"flag": False, "scale": 2.0}),
    ((X,), {"scale": 2.0, "flag": False}),
    ((X, Y, Y), {}),
    ((X, Y), {"other": Y}),
    (((X, Y),), {}),
    (({"a": X},), {}),
    ((1.0,), {}),
    ((object(),), {}),
    ((), {}),
    ((X,), {"x": X}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS[:25])
def test_a_call_is_of_the_form_that_binding_it_says(args: Any, kwargs: Any) -> None:
    form, _ = CallForm.of(Net(), args, kwargs)
    for _ in range(2):  # the second time from what was found out before
        for given, named in CALLS:
            actual, expected = form.tensors(given, named), form._tensors_inside(given, named)
            if expected is None:
                assert actual is None
            else:
                assert actual is not None
                assert list(map(id, actual)) == list(map(id, expected))


def test_spellings_of_one_call_are_one_form() -> None:
    form, leaves = CallForm.of(Net(), (X, Y), {})
    for args, kwargs in (((X,), {"mask": Y}), ((), {"mask": Y, "x": X}), ((X, Y), {"scale": 1.0})):
        found = form.tensors(args, kwargs)
        assert found is not None
        assert [id(x) for x in found] == [id(x) for x in leaves]
    assert form.tensors((X,), {}) is None
    assert form.tensors((X, Y), {"scale": 1}) is None
    assert form.tensors((X, Y), {"other": Y}) is None


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Pair:
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("calibrated", "given", "why"),
    [
        (X, 1.0, "x was a tensor, and is 1.0"),
        (2.0, X, "x was 2.0, and is a tensor of shape (2,)"),
        (2.0, 2, "x was 2.0, and is 2"),
        (2.0, 3.0, "x was 2.0, and is 3.0"),
        ([X, Y], [X], "x was a list of 2 values, and is a list of 1 values"),
        ([X, Y], (X, Y), "x was a list of 2 values, and is a tuple of 2 values"),
        ([X, 1], [X, 2], "x[1] was 1, and is 2"),
        ({"a": X, "b": 1}, {"a": X, "b": 2}, "x['b'] was 1, and is 2"),
        ({"a": X}, {"b": X}, "x was a dict of a, and is a dict of b"),
        (Pair(X, 1), Pair(X, 2), "x['y'] was 1, and is 2"),
        (Point(X, 1), Point(X, 2), "x['y'] was 1, and is 2"),
        ({"a": [X, {"b": X}]}, {"a": [X, {"b": None}]},
         "x['a'][1]['b'] was a tensor, and is None"),
        (X, {1, 2}, "x was a tensor, and is {1, 2}"),
        ([X], {1, 2}, "x: a graph cannot take or return builtins.set"),
        (None, "word" * 40, "x was None, and is " + "word" * 20),
    ],
)  # fmt: skip
def test_it_says_how_a_call_differs(calibrated: Any, given: Any, why: str) -> None:
    form, _ = CallForm.of(Net(), (calibrated,), {})
    assert form.tensors((given,), {}) is None
    assert form.refusal((given,), {}) == why


def test_it_says_what_arguments_are_missing_or_odd() -> None:
    form, _ = CallForm.of(Net(), (X,), {})
    assert form.refusal((), {}) == "missing a required argument: 'x'"
    # What no part of it differs in: a number too many among the rest.
    assert (
        form.refusal((X, None, X), {}) == "more was a tuple of 0 values, and is a tuple of 1 values"
    )


def function(forward: Callable[..., Any]) -> nn.Module:
    """A module whose forward is ``forward``."""
    module = nn.Module()
    module.forward = forward
    return module


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "plain"),
    [
        (lambda x, y: x, (X, Y), {}, True),
        (lambda x, /, y: x, (X, Y), {}, True),
        (lambda x, y=None: x, (X, Y), {}, False),
        (lambda x, *, y: x, (X,), {"y": Y}, False),
        (lambda *x: x, (X, Y), {}, False),
        (lambda **x: x, (), {"y": X}, False),
        (lambda x, y: x, (X, 1.0), {}, False),
        (lambda x: x, ([X],), {}, False),
    ],
)
def test_plain_is_tensors_by_position(
    forward: Callable[..., Any], args: Any, kwargs: Any, plain: bool
) -> None:
    assert CallForm.of(function(forward), args, kwargs)[0].is_plain == plain


def parameters(form: CallForm) -> str:
    return str(form.signature)


def test_defaults_that_no_graph_can_take_are_left_out_or_have_to_be_given() -> None:
    def forward(x: Any, act: Any = torch.relu, scale: Any = 2.0, *, end: Any = len) -> Any:
        return x

    module = function(forward)
    form, _ = CallForm.of(module, (X,), {})
    assert parameters(form) == "(x, *, scale=2.0)"
    assert form.names == ("x",)
    assert form.tensors((X,), {"scale": 2.0}) is not None
    assert form.tensors((X,), {"act": X}) is None
    given, _ = CallForm.of(module, (X, Y), {})
    assert parameters(given) == "(x, act, scale=2.0)"
    assert given.names == ("x", "act")
    assert given.tensors((X,), {}) is None
    named, _ = CallForm.of(module, (X,), {"end": Y})
    assert parameters(named) == "(x, *, scale=2.0, end)"
    assert named.names == ("x", "end")

    def all_given(x: Any = None, act: Any = torch.relu, scale: Any = 2.0) -> Any:
        return x

    form, _ = CallForm.of(function(all_given), (X, Y), {})
    assert parameters(form) == "(x, act, scale=2.0)"  # those before it have to be given, too

    def plain(x: Any, scale: Any = 2.0) -> Any:
        return x

    assert parameters(CallForm.of(function(plain), (X,), {})[0]) == "(x, scale=2.0)"


def test_tensors_have_the_names_of_their_arguments() -> None:
    form, leaves = CallForm.of(Net(), ([X, Y], (X, 1)), {"scale": Y, "other": X, "pair": {"a": Y}})
    assert form.names == ("x_0", "x_1", "mask_0", "scale", "other", "pair_0")
    assert len(leaves) == len(form.names)


def test_a_call_is_given_as_it_was_without_defaults() -> None:
    def forward(a: Any, b: Any = 1, c: Any = None, *, d: Any = 2) -> Any:
        return a

    module = function(forward)
    for given, named, args, kwargs in [
        ((X,), {}, (X,), {}),
        ((X, Y), {}, (X, Y), {}),
        ((X,), {"c": Y}, (X,), {"c": Y}),
        ((X,), {"d": Y}, (X,), {"d": Y}),
        ((X, Y, X), {"d": Y}, (X, Y, X), {"d": Y}),
    ]:
        form, leaves = CallForm.of(module, given, named)
        found, by_name = form.call(leaves)
        by_name = {name: x for name, x in by_name.items() if x is not _DEFAULTS.get(name)}
        assert list(map(id, found)) == list(map(id, args))
        assert {n: id(x) for n, x in by_name.items()} == {n: id(x) for n, x in kwargs.items()}


_DEFAULTS = {"b": 1, "d": 2}


@pytest.mark.parametrize(
    "value",
    [
        X, [X, Y], (X, 1.0), {"a": X, "b": [Y, None]}, Pair(X, 2), Point(X, [Y]), torch.Size([3]),
        collections.OrderedDict(a=X), slice(1, 2), torch.float32, "word", b"word", 1j,
    ],
)  # fmt: skip
def test_what_was_taken_apart_is_put_together_again(value: Any) -> None:
    structure, leaves = take_apart(value)
    again = structure.fill(leaves)
    assert type(again) is type(value)
    assert same_structure(take_apart(again)[0], structure)
    assert [id(x) for x in take_apart(again)[1]] == [id(x) for x in leaves]
    assert structure.leaves == len(leaves)


def test_structures_differ_in_kind_keys_length_and_values() -> None:
    values = [X, [X], [X, X], (X, X), {"a": X}, {"b": X}, Point(X, X), Pair(X, X), 1, 1.0, True,
              None, [X, 1], [X, 2], collections.OrderedDict(a=X)]  # fmt: skip
    structures = [take_apart(value)[0] for value in values]
    for i, one in enumerate(structures):
        for j, other in enumerate(structures):
            assert same_structure(one, other) == (i == j)


def test_what_no_graph_can_take_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"cannot take or return builtins\.set"):
        take_apart([X, {1}])
