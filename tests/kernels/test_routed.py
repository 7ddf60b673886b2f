"""Routed packs give the reference's results whatever the table says: it can only cost speed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import x86quant
from tests.isa import skip_unless_lower
from tests.kernels.test_conformance import convolutions, linears
from tests.packs import Y_ZERO_POINT, Problem, quantized_weight
from tests.stock_tensors import engine
from x86quant.kernels import all_kernels
from x86quant.tables.conditions import parse_pattern
from x86quant.tables.table import Rule, RuleTable

some = settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def scrambled(order: list[str], rows: int) -> RuleTable:
    """A table that prefers the kernels in this order, turned around from so many rows on."""
    rules: list[Rule] = []
    for condition, use in (({"rows": f">= {rows}"}, order[::-1]), ({}, order)):
        op, when = parse_pattern("*", condition)
        rules.append(Rule(op, when, tuple(use), "scrambled", f"scrambled#{len(rules) + 1}", 1))
    return RuleTable("scrambled", tuple(rules))


def run_routed(problem: Problem, table: RuleTable) -> torch.Tensor:
    s, weight = problem.spec, quantized_weight(problem)
    name = s.op.replace("conv", "conv_transpose" if s.transposed else "conv")
    with engine("x86"), x86quant.enable(), x86quant.use_rules(table):
        if s.op == "linear":
            pack = torch.ops.quantized.linear_prepack(weight, problem.bias)
        else:
            prepack = getattr(torch.ops.quantized, f"{name}_prepack")
            extra = (s.output_padding or (0,) * s.dims,) if s.transposed else ()
            pack = prepack(weight, problem.bias, s.stride, s.padding, *extra, s.dilation, s.groups)
    x = torch._make_per_tensor_quantized_tensor(problem.x, problem.x_scale, problem.x_zero_point)
    op = getattr(torch.ops.quantized, name + ("_relu" if problem.relu else ""))
    return op(x, pack, problem.y_scale, Y_ZERO_POINT).int_repr()


def check(problem: Problem, order: list[str], rows: int) -> None:
    if 0 in (problem.spec.in_channels, problem.spec.out_channels):
        return
    got, want = run_routed(problem, scrambled(order, rows)), problem.expected()
    assert got.shape == want.shape
    if want.numel():
        assert int((got.int() - want.int()).abs().max()) <= 1


@given(convolutions(), st.permutations(list(all_kernels())), st.sampled_from((1, 10, 100)))
@some
def test_convolutions_under_scrambled_tables(problem, order, rows):
    check(problem, order, rows)


@given(linears(), st.permutations(list(all_kernels())), st.sampled_from((1, 2, 4)))
@some
def test_linears_under_scrambled_tables(problem, order, rows):
    check(problem, order, rows)


TESTS = Path(__file__).parents[1]
FILES = (
    TESTS / "kernels" / "test_routed.py",
    *(TESTS / "stock" / f"test_{name}.py" for name in ("stock_engine", "stock_traps", "qconfig")),
)


@pytest.mark.skipif(bool(os.environ.get("X86QUANT_ISA")), reason="already capped")
@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx_vnni", "avx512_vnni"])
def test_the_whole_workflow_at_every_lower_level(isa, capsys):
    import subprocess
    import sys

    skip_unless_lower(isa)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *map(str, FILES),
        ],
        env={**os.environ, "X86QUANT_ISA": isa, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr
    with capsys.disabled():
        print(f"\nstock workflows at {isa}: {summary}")
    assert done.returncode == 0, done.stdout[-4000:]
