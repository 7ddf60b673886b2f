"""What torch.export traced once is spelled as torch spells it where it traces it twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from x86quant.capture import exported as exporting
from x86quant.capture.exported import ops_from_export
from x86quant.forms.call_form import CallForm
from x86quant.lowering.row_passes.known import drop_identities
from x86quant.lowering.row_passes.one_spelling import spell_alike

Code = Callable[[torch.Tensor], torch.Tensor]


class Codes(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(8, 8), code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self.linear(x)) + 1


def spelled(code: Code) -> tuple[list[str], torch.Tensor]:
    torch.manual_seed(0)
    module, x = Codes(code).eval(), torch.randn(4, 6, 8)
    form, leaves = CallForm.of(module, (x,), {})
    gm = ops_from_export(module, form, leaves).graph_module
    spell_alike(gm)
    drop_identities(gm)
    gm.graph.eliminate_dead_code()
    (found,) = gm(*leaves)
    assert torch.equal(found, module(x))
    names = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    # Sizes are computed there, where a reshape finds one by itself here.
    return [name for name in names if name.startswith("aten.") and "sym_" not in name], found


CODES: dict[str, Code] = {
    "views": lambda x: x.view(-1, 8).reshape(x.shape[0], 6, 8),
    "flattened": lambda x: x.transpose(1, 2).flatten(1),
    "flattened in front": lambda x: x.flatten(0, 1).relu().flatten(),
    "free sizes beside": lambda x: x.unflatten(2, (2, 2, 2)).flatten(2, 3),
    "chunks": lambda x: torch.cat([y.relu() for y in x.chunk(3, -1)], -1),
    "chunks in front": lambda x: x.transpose(0, 2).chunk(4)[1].contiguous(),
    "no cast": lambda x: x.to(torch.float32).to("cpu").to(x),
    "casts": lambda x: (x > 0).to(torch.float32) * x.double().float(),
    "constants": lambda x: x * torch.tensor(0.5, dtype=torch.float32).detach_(),
    "copies": lambda x: F.dropout(x.transpose(1, 2).contiguous(), 0.5, training=False).clone(),
}


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_it_is_what_a_second_trace_makes(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_rewritten", lambda *_, **__: None)
        twice, expected = spelled(code)
    monkeypatch.setattr(exporting, "functionalized", _refuse)
    once, found = spelled(code)
    assert once == twice
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.clone()[..., :4].add_(1),
        lambda x: x.narrow(2, 0, 4),
        lambda x: F.dropout(x, 0.0, training=True),
    ],
    ids=["a write to a view", "another word", "dropout in training"],
)
def test_what_it_does_not_know_is_traced_twice(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    again = exporting.functionalized
    monkeypatch.setattr(exporting, "functionalized", lambda p: seen.append(p) or again(p))
    spelled(code)
    assert seen


def _refuse(_: object) -> None:
    raise AssertionError("it is traced twice")
