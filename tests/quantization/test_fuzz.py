"""Random programs, a few of those of ``python -m benchmarks.fuzz_programs``, and their judge."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.fuzz import judging
from benchmarks.fuzz.drawing import write
from benchmarks.fuzz.judging import Judge, judged
from benchmarks.fuzz.ledger import Judged, Ledger
from benchmarks.fuzz.programs import Program
from benchmarks.fuzz.shrinking import shrunk
from x86quant.capture import proof
from x86quant.capture.observed import Observed
from x86quant.compiled import CompiledModule
from x86quant.lowering.graph_tools import is_op
from x86quant.quantization.deciding import layers_in_float
from x86quant.quantization.static import part_search, static_part
from x86quant.quantization.tracing import tracing

SHAPE = (2, 8, 6)


def program(*body: str, result: str = "y") -> Program:
    made = ("self.a = nn.Linear(6, 6)", "self.b = nn.Linear(6, 6)")
    return Program(made, ("y = self.a(x0)", *body, "y = self.b(y)"), result, (SHAPE,), seed=1)


def test_random_programs_quantized() -> None:
    verdicts = [judged(write(seed, most=6), "quantize") for seed in range(100)]
    failed = {n: x.reason for n, x in enumerate(verdicts) if x.kind == "failed"}
    assert not failed
    forms = collections.Counter(x.form for x in verdicts)
    assert forms["whole"] >= 60
    assert sum(x.int8_calls > 0 for x in verdicts) >= 80


def test_random_programs_converted_and_compiled() -> None:
    verdicts = [judged(write(seed, most=6), "compile") for seed in range(20)]
    assert not {n: x.reason for n, x in enumerate(verdicts) if x.kind == "failed"}
    assert sum(x.kind == "passed" for x in verdicts) >= 8


#: What random programs found, shrunk: lines of ``__init__`` and ``forward``, and the result.
FOUND = {
    "a mean of a number": (
        ("self.a = nn.Conv1d(8, 4, 3)",),
        ("y = F.hardshrink(self.a(x0))", "y = torch.nanmedian(y).mean(0, keepdim=True)"),
        "y",
    ),
    "a batch norm of rows, not of the linear's features": (
        ("self.a = nn.Linear(6, 2)", "self.b = nn.BatchNorm1d(8)"),
        ("y = self.b(self.a(x0))",),
        "y",
    ),
    "a batch norm of places, not of an unbatched signal's channels": (
        ("self.a = nn.Conv1d(8, 3, 3)", "self.b = nn.BatchNorm1d(4)", "self.c = nn.Linear(4, 2)"),
        ("y = self.b(self.a(x0.mean(0)))",),
        "self.c(y)",
    ),
    "a vector that a single column is spread over": (
        ("self.a = nn.Conv1d(8, 8, 3, padding=1)", "self.p = nn.Parameter(torch.randn(6))"),
        ("y = (self.a(x0) * self.p).squeeze()",),
        "y",
    ),
    "a layer norm behind a rank that depends on the batch": (
        ("self.a = nn.Conv1d(8, 8, 3, padding=1)", "self.b = nn.LayerNorm(6)"),
        ("y = self.b(torch.relu(self.a(x0)).squeeze())",),
        "y",
    ),
    "a view that only eager torch can take, of what it pools in one op": (
        ("self.a = nn.Conv2d(1, 2, 3)",),
        (
            "y = F.max_pool1d(self.a(x0.unsqueeze(1)).select(1, 0).mT, 3, 1, 1)",
            "y = y.relu() if bool((y > 9).any()) else y",
            "z = y.view(y.shape[0], -1)",
        ),
        "y, F.hardswish(z, inplace=True)",
    ),
    "a shape that changes in place": (
        ("self.a = nn.Linear(6, 4)", "self.b = nn.Linear(4, 2)"),
        ("y = self.a(x0)", "z = y.relu_()", "torch.sum(x0, -1, out=z)", "y.unsqueeze_(0)"),
        "self.b(y[..., :4])",
    ),
}


@pytest.mark.parametrize("through", judging.THROUGH)
@pytest.mark.parametrize("case", FOUND)
def test_found(case: str, through: str) -> None:
    made, body, result = FOUND[case]
    verdict = judged(Program(made, body, result, (SHAPE,), seed=1), through)
    assert verdict.kind == "passed" or verdict.reason == "stock", verdict.reason


def test_a_seed_is_one_program() -> None:
    assert [write(seed) for seed in range(3)] == [write(seed) for seed in range(3)]


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda y: y + 0.3,
        lambda y: y.double(),
        lambda y: y[:, :1],
        lambda y: (y,),
        lambda y: y.where(y < 0, torch.nan),
        torch.zeros_like,
        lambda y: y.flip(0),
    ],
)
def test_wrong_answers_are_noticed(spoilt: Any) -> None:
    one = program()
    model = one.build()
    inputs = one.data(10, 3)
    with torch.no_grad():
        expected = model(*inputs)
    assert Judge(model, one).wrong(expected, expected, inputs) is None
    assert Judge(model, one).wrong(spoilt(expected), expected, inputs) is not None


def test_another_number_of_what_is_found_is_right_where_rounding_changes_it() -> None:
    one = program("y = torch.argwhere((self.b(y) * 1e4).int() % 2)", "return y, y.float()")
    model, inputs = one.build(), one.data(10, 3)
    with torch.no_grad():
        expected = model(*inputs)
    judge = Judge(model, one)
    fewer = tuple(x[:-3] for x in expected)
    assert judge.wrong(fewer, expected, inputs) is None
    assert not judge.sharp
    assert Judge(model, one).wrong(tuple(x[:, :2] for x in expected), expected, inputs) is not None
    plain = program("y = torch.argwhere(torch.ones_like(y))", "return y")
    with torch.no_grad():
        expected = plain.build()(*inputs)
    assert Judge(plain.build(), plain).wrong(expected[:-3], expected, inputs) is not None


def test_next_to_nothing_may_stand_for_zeros_alone() -> None:
    one = program("y = F.layer_norm(y.unsqueeze(-1), (1,))", "return y")
    model, inputs = one.build(), one.data(10, 3)
    with torch.no_grad():
        expected = model(*inputs)
    assert not expected.any()
    assert Judge(model, one).wrong(expected + 1e-5, expected, inputs) is None
    assert Judge(model, one).wrong(expected + 1e-3, expected, inputs) is not None
    assert Judge(model, one).wrong(expected + float("nan"), expected, inputs) is not None


def test_a_row_with_infinity_may_be_nan_in_that_row_alone() -> None:
    infinity = "y = torch.cat([y[..., :1] / (x0[..., :1] > 0), y[..., 1:]], -1)"
    one = program(infinity, result="2 / (y.abs() + 1)")
    model, inputs = one.build(), one.data(10, 3)
    with torch.no_grad():
        expected = model(*inputs)
    infinite = inputs[0][..., :1] <= 0
    assert infinite.any()
    assert not infinite.all()
    undefined = expected.masked_fill(infinite, torch.nan)
    judge = Judge(model, one)
    assert judge.wrong(undefined, expected, inputs) is None
    assert not judge.sharp
    everywhere = torch.full_like(expected, torch.nan)
    assert Judge(model, one).wrong(everywhere, expected, inputs) is not None


def test_a_wrong_zero_point_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = judging.quantized
    assert judged(program(), "quantize").kind == "passed"

    def shifted(model: nn.Module, one: Program) -> Any:
        fast, reference = right(model, one)
        for node in fast.graph_module.graph.nodes:  # type: ignore[union-attr]
            if is_op(node, "linear", "linear_real"):
                node.kwargs = {**node.kwargs, "x_zp": node.kwargs["x_zp"] + 12}
        fast.graph_module.recompile()  # type: ignore[union-attr]
        return CompiledModule(fast.graph_module), reference

    monkeypatch.setitem(judging._THROUGH, "quantize", shifted)
    verdict = judged(program(), "quantize")
    assert verdict.kind == "failed"
    assert "dB" in verdict.reason


@pytest.mark.parametrize("write_in_place", ["y.clamp_(-0.1, 0.1)", "y[:, :4].mul_(0.0)"])
def test_a_lost_write_fails(monkeypatch: pytest.MonkeyPatch, write_in_place: str) -> None:
    one = program("torch.tanh(y)", write_in_place)
    assert judged(one, "quantize").kind == "passed"

    def kept(gm: torch.fx.GraphModule, _: Any, **__: Any) -> torch.fx.GraphModule:
        for node in [n for n in gm.graph.nodes if n.target in ("clamp_", "mul_")]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        return gm

    monkeypatch.setattr(tracing, "without_mutations", kept)
    assert judged(one, "quantize").form == "whole"  # the proof refuses that graph; export is right
    monkeypatch.setattr(proof, "difference", lambda *_: None)
    monkeypatch.setattr(static_part, "difference", lambda *_: None)
    assert judged(one, "quantize").form == "float"  # nor is it as good as it has to be
    monkeypatch.setattr(layers_in_float, "ENOUGH_DB", -1000.0)
    monkeypatch.setattr(layers_in_float, "USABLE_DB", -1000.0)
    verdict = judged(one, "quantize")
    assert verdict.kind == "failed"
    small = shrunk(one, "quantize", verdict.reason).body
    assert write_in_place in small
    assert "torch.tanh(y)" not in small


def test_an_overwritten_input_that_is_not_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    one = program("x0.mul_(0.5)")
    assert judged(one, "quantize").kind == "passed"
    blind = part_search.observe

    def unseen(*arguments: Any, **options: Any) -> Any:
        found = blind(*arguments, **options)
        return {
            path: [Observed(x.call, x.result, False) for x in seen] for path, seen in found.items()
        }

    monkeypatch.setattr(part_search, "observe", unseen)
    assert "output 1" in judged(one, "quantize").reason


def test_an_input_overwritten_by_other_values_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = judging.quantized

    def spoilt(model: nn.Module, one: Program) -> Any:
        fast, reference = right(model, one)

        def overwrite(_: nn.Module, args: Any, result: Any) -> None:
            args[0].mul_(2.0)

        fast.register_forward_hook(overwrite)
        return fast, reference

    one = program("x0.mul_(0.5)")
    monkeypatch.setitem(judging._THROUGH, "quantize", spoilt)
    assert "dB" in judged(one, "quantize").reason


def test_what_was_judged_is_left_out_and_added_up(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add(Judged("quantize", 3, 6, 2, 1, 0, 0.5, "abc", "a CPU"))
    ledger.add(Judged("quantize", 5, 7, 2, 0, 0, 0.5, "def", "a CPU"))
    assert ledger.left(range(1, 9), "quantize") == [1, 2, 7, 8]
    assert ledger.left(range(1, 9), "compile") == list(range(1, 9))
    *commits, total = ledger.total().splitlines()
    assert [line.split()[1] for line in commits] == ["abc", "def"]
    assert total.startswith("in all: 4 programs: 4 passed, 1 failed")
    assert ledger.commit not in ("", "+")
