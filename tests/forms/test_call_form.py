"""How calls are told apart: by what they mean, however they are spelled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from x86quant.forms.call_form import CallForm

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
