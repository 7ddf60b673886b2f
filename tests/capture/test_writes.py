"""What writes over what was just made is traced as making something new."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from x86quant.capture import exported
from x86quant.capture.exported import ops_from_export
from x86quant.forms.call_form import CallForm

X = torch.arange(24.0).reshape(3, 8)


class _Code(nn.Module):
    def __init__(self, code: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: torch.Tensor) -> object:
        return self.code(x)


def _sum_in_place(x: torch.Tensor) -> object:
    y = x * 2
    before = y + 1
    y += x
    y.mul_(3).sub_(1)
    return before, y, y * x


def _masked(x: torch.Tensor) -> object:
    y = x.softmax(1)
    y.masked_fill_(x > 10, 0.0)
    return y.clamp_(max=0.5) + y


def _view_sees_it(x: torch.Tensor) -> object:
    y = x * 2
    first = y[:, 0]
    y += 1
    return first, y


def _writes_to_a_view(x: torch.Tensor) -> object:
    y = x * 2
    y[:, :4].mul_(3)
    return y


def _writes_twice(x: torch.Tensor) -> object:
    y = x * 2
    z = y.add_(1)
    y.mul_(2)
    return z, y


def _keeps_its_type(x: torch.Tensor) -> object:
    y, z = x * 2, x + 1
    y.gt_(3)
    z.add_(x.double() / 3)
    return y, z


@pytest.mark.parametrize(
    ("code", "quick"),
    [
        (_sum_in_place, True),
        (_masked, True),
        (_writes_twice, True),
        (_view_sees_it, False),
        (_writes_to_a_view, False),
        (_keeps_its_type, False),
    ],
)
def test_writes_give_what_they_did(
    code: Callable[[torch.Tensor], object], quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: list[object] = []
    functionalized = exported.functionalized
    monkeypatch.setattr(
        exported, "functionalized", lambda program: slow.append(1) or functionalized(program)
    )
    module = _Code(code)
    form, leaves = CallForm.of(module, (X,), {})
    traced = ops_from_export(module, form, leaves)
    assert (not slow) == quick
    for x in (X, torch.randn(5, 8)):
        want = code(x.clone())
        found = traced.graph_module(x.clone())
        wanted = want if isinstance(want, tuple) else (want,)
        assert len(found) == len(wanted)
        assert [a.dtype for a in found] == [b.dtype for b in wanted]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
