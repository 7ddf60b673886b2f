"""Batches without their padding: what is left out, and that no result tells."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import x86quant
from tests.row_samples import floats
from tests.runtime.test_row_steps import _Net, _weights
from tests.serving.served import Served
from x86quant.capture.exported import ops_from_export
from x86quant.compiled.module import CompiledModule
from x86quant.dynamic import to_dynamic
from x86quant.forms.call_form import CallForm
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.lower import lower_rows
from x86quant.lowering.row_passes import ROW_PASSES
from x86quant.lowering.row_passes.padding import leave_out_padding

ops = torch.ops.x86quant

LENGTHS = torch.tensor([5, 1, 7, 0, 3])
TOKENS = 7
PREFIX = torch.arange(TOKENS) < LENGTHS[:, None]
#: Masks, and whether attention sums in the order in which it does with padding.
MASKS = {
    "behind": (PREFIX, True),
    "in front": (PREFIX.flip(1), False),
    "between": (torch.rand(5, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.6, False),
    "none": (torch.ones(5, TOKENS, dtype=torch.bool), True),
    "all": (torch.zeros(5, TOKENS, dtype=torch.bool), True),
}

Finish = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Encoder(nn.Module):
    """Two layers as transformers write them, and what ``finish`` makes of tokens and mask."""

    def __init__(self, finish: Finish, norm_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.finish, self.norm_first = finish, norm_first
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norms": nn.ModuleList(nn.LayerNorm(32) for _ in range(2)),
                    "qkv": nn.ModuleList(nn.Linear(32, 32) for _ in range(4)),
                    "up": nn.Linear(32, 64),
                    "down": nn.Linear(64, 32),
                }
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        seen = mask.bool()[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        for layer in self.layers:
            given: Any = layer
            q, k, v = (f(x).unflatten(-1, (2, 16)).transpose(1, 2) for f in given["qkv"][:3])
            attended = nn.functional.scaled_dot_product_attention(q, k, v, seen)
            x = given["norms"][0](x + given["qkv"][3](attended.transpose(1, 2).flatten(2)))
            x = given["norms"][1](x + given["down"](nn.functional.gelu(given["up"](x))))
        return self.finish(x, mask)


def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def mean_of_expanded(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).expand(x.size()).float()
    return (x * weights).sum(1)


def most(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(mask.unsqueeze(-1) == 0, -1e9).amax(1)


def most_where(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.bool().unsqueeze(-1), x, -1e9).amax(1)


def first(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, 0]


def lowered(
    finish: Finish, mask: torch.Tensor, *, without: bool = False
) -> tuple[CompiledModule, collections.Counter[str]]:
    """The encoder as it runs, for any sizes; ``without`` the pass."""
    exported = traced(finish, mask.dtype)
    passes = tuple(one for one in ROW_PASSES if not without or one is not leave_out_padding)
    graph, reports = lower_rows(exported, passes)
    return CompiledModule(graph, reports), counted(graph)


@functools.lru_cache
def traced(finish: Finish, dtype: torch.dtype) -> GraphModule:
    model = to_dynamic(Encoder(finish).eval())
    form, leaves = CallForm.of(model, (floats(5, TOKENS, 32), PREFIX.to(dtype)), {})
    return ops_from_export(model, form, leaves).graph_module


def counted(graph: GraphModule) -> collections.Counter[str]:
    return collections.Counter(op_name(n) for n in graph.graph.nodes if is_op(n))


@pytest.mark.parametrize("finish", [mean, mean_of_expanded, most, most_where, first])
def test_results_do_not_tell_that_padding_was_left_out(finish: Finish) -> None:
    padded, before = lowered(finish, PREFIX.long(), without=True)
    module, found = lowered(finish, PREFIX.long())
    assert before["attention_rows"] == found["present_attention_rows"] == 2
    assert found["gather_tokens"] == found["scatter_tokens"] == found["present_tokens"] == 1
    assert "attention_rows" not in found
    x = floats(5, TOKENS, 32)
    for name, (mask, same_order) in MASKS.items():
        with torch.no_grad():
            (want,), (got,) = padded(x, mask.long()), module(x, mask.long())
            (plain,) = module.graph_module(x, mask.long())
        if same_order:
            assert torch.equal(got, want), name
        # A code at the edge of its step may be the next one.
        torch.testing.assert_close(got, want, rtol=0, atol=0.03)
        torch.testing.assert_close(got, plain, rtol=0, atol=0.03)
    assert len(module.segments) == 1


def test_every_step_is_told_how_many_rows_there_are() -> None:
    module, _ = lowered(mean, PREFIX.long())
    with torch.no_grad():
        module(floats(5, TOKENS, 32), PREFIX.long())
    (segment,) = module.segments
    first, *steps = segment.plans[-1].steps
    starts = first.others[0].buffer
    assert first.op == "present_tokens"
    assert len(steps) > 10
    for step in steps:
        assert any(value.buffer is starts for value in step.inputs), step


def test_tokens_behind_the_last_are_not_computed() -> None:
    """Numbers of hidden tokens reach no step that computes with them."""
    module, _ = lowered(mean, PREFIX.long())
    x = floats(5, TOKENS, 32)
    with torch.no_grad():
        (want,) = module(x, PREFIX.long())
        # Rows of hidden tokens that are no numbers stay out of sight, which 0 * NaN would not.
        (got,) = module(x.masked_fill(~PREFIX[..., None], torch.nan), PREFIX.long())
    assert torch.equal(got, want)


def test_other_sizes_share_the_graph() -> None:
    padded, _ = lowered(mean, PREFIX.long(), without=True)
    module, _ = lowered(mean, PREFIX.long())
    for batch, tokens in ((2, 40), (9, 3), (3, 300)):
        mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (batch, 1))
        x = floats(batch, tokens, 32)
        with torch.no_grad():
            assert torch.equal(module(x, mask.long())[0], padded(x, mask.long())[0])
    with torch.no_grad():
        assert module(floats(2, 0, 32), torch.zeros(2, 0).long())[0].shape == (2, 32)
        assert module(floats(0, 4, 32), torch.zeros(0, 4).long())[0].shape == (0, 32)


def test_a_mask_of_bool_is_taken_too() -> None:
    def mean_of_bool(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask.unsqueeze(-1)).sum(1)

    padded, _ = lowered(mean_of_bool, PREFIX, without=True)
    module, found = lowered(mean_of_bool, PREFIX)
    assert found["present_tokens"] == 1
    x = floats(5, TOKENS, 32)
    with torch.no_grad():
        assert torch.equal(module(x, PREFIX)[0], padded(x, PREFIX)[0])


def shown(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * 2


def last(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, -1]


def shifted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask.roll(1, 1).unsqueeze(-1)).sum(1)


def inverted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * (1 - mask).unsqueeze(-1)).sum(1)


def both(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.cat((mean(x, mask), x.amax(1)), -1)


def hidden_where(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.bool().unsqueeze(-1), 0.0, x).sum(1)


@pytest.mark.parametrize("finish", [shown, last, shifted, inverted, both, hidden_where])
def test_padding_that_a_result_may_show_is_computed(finish: Finish) -> None:
    module, found = lowered(finish, PREFIX.long())
    padded, _ = lowered(finish, PREFIX.long(), without=True)
    assert found["attention_rows"] == 2
    assert "present_tokens" not in found
    x = floats(5, TOKENS, 32)
    with torch.no_grad():
        assert torch.equal(module(x, PREFIX.long())[0], padded(x, PREFIX.long())[0])


@pytest.mark.parametrize("present", [True, False])
def test_which_tokens_are_present(present: bool) -> None:
    """The step gives what the op does, places of the others behind included."""
    net = _Net()
    node = net.call("present_tokens", mask=net.input("mask"), first=present)
    module = net.compiled(*net.items(node, 0, 1, 2))
    for mask, _ in MASKS.values():
        for got, want in zip(module(mask), ops.present_tokens(mask, present), strict=True):
            assert torch.equal(got, want)
    assert len(module.segments) == 1
    with pytest.raises(ValueError, match="bool"):
        module(PREFIX.long())


def test_rows_come_back_to_their_places() -> None:
    net = _Net()
    x, mask = net.input("x"), net.input("mask")
    places, starts, _ = net.items(net.call("present_tokens", mask=mask, first=False), 0, 1, 2)
    rows = net.call("gather_tokens", x=x, places=places, starts=starts)
    module = net.compiled(net.call("scatter_tokens", x=rows, places=places, starts=starts))
    given = floats(5, TOKENS, 33)
    for mask, _ in MASKS.values():
        assert torch.equal(module(given, mask)[0], given * mask[..., None])
    assert len(module.segments) == 1


@pytest.mark.parametrize(
    ("places", "starts"),
    [
        ([0, 1, 2, 3, 4, 5], [0, 4, 6]),  # more than a sentence has
        ([0, 1, 2, 3, 4, 5], [0, 3, 2]),
        ([0, 1, 2, 3, 4, 5], [1, 3, 6]),
        ([1, 0, 2, 3, 4, 5], [0, 3, 6]),
        ([0, 1, 2, 3, 4, 6], [0, 3, 6]),
        ([-1, 1, 2, 3, 4, 5], [0, 3, 6]),
    ],
)
@pytest.mark.parametrize("op", ["gather_tokens", "scatter_tokens"])
def test_places_outside_of_a_batch_are_refused(
    op: str, places: list[int], starts: list[int]
) -> None:
    net = _Net()
    module = net.compiled(net.call(op, **{n: net.input(n) for n in ("x", "places", "starts")}))
    x = floats(2, 3, 8)
    good = (torch.arange(6), torch.tensor([0, 3, 6]))
    assert torch.equal(module(x, *good)[0], x)
    with pytest.raises(ValueError, match="batch"):
        module(x, torch.tensor(places), torch.tensor(starts))


def test_a_program_file_leaves_padding_out(tmp_path: Path) -> None:
    net = _Net()
    x, places, starts = (net.input(name) for name in ("x", "places", "starts"))
    told = {"places": places, "starts": starts}
    rows = net.rows(net.call("gather_tokens", x=x, **told))
    product = net.call("linear_rows", **rows, **_weights(48, 32), activation=None)
    module = net.compiled(net.call("scatter_tokens", x=product, **told))
    calls = [
        (floats(5, TOKENS, 32), *ops.present_tokens(mask, False)[:2]) for mask, _ in MASKS.values()
    ]
    x86quant.export_program(module, tmp_path / "tokens.xq", calls[:1])
    served = Served(tmp_path / "tokens.xq", threads=2)
    for call, (mask, _) in zip(calls, MASKS.values(), strict=True):
        (got,), (want,) = served(*call), module(*call)
        assert torch.equal(got, want)
        assert torch.equal(want == 0, ~mask[..., None].expand_as(want))


def test_a_program_file_that_would_take_a_mask_of_bool_is_refused(tmp_path: Path) -> None:
    net = _Net()
    x, mask = net.input("x"), net.input("mask")
    present = net.call("present_tokens", mask=mask, first=False)
    places, starts = net.items(present, 0, 1)
    module = net.compiled(net.call("gather_tokens", x=x, places=places, starts=starts))
    with pytest.raises(x86quant.UnsupportedError, match="takes a tensor of bool"):
        x86quant.export_program(module, tmp_path / "t.xq", [(floats(5, TOKENS, 32), PREFIX)])
    assert not (tmp_path / "t.xq").exists()
