"""Tuning: what is measured, and whether every kernel computes it."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import get_args

import pytest
from torch import nn

from tests import isa
from tests.tuning.small_runs import (
    CONV,
    CONV_LINE,
    HEADER,
    LINEAR,
    Net,
    _own_cache,
    case,
    shapes_csv,
)
from x86quant.cli import tune
from x86quant.errors import InvalidInputError, MeasurementError
from x86quant.hardware.cpu import cpu
from x86quant.kernels import all_kernels, dynamic_kernels, graph_kernels
from x86quant.spec import OpSpec, lookup_spec
from x86quant.tuning import measure
from x86quant.tuning.candidates import candidates
from x86quant.tuning.cases import (
    EMBEDDINGS,
    LAYERS,
    PROBES,
    Grid,
    Shape,
    jobs,
    read_shapes,
    select,
    supports,
)
from x86quant.tuning.layer_shapes import with_rows
from x86quant.tuning.measured_lookups import make_lookup
from x86quant.tuning.measurements import Caller
from x86quant.tuning.model_shapes import load_model, model_shapes
from x86quant.tuning.operands import make_operands, result_shape
from x86quant.tuning.samples import PROBES_NET

__all__ = ["_own_cache", "shapes_csv"]

# ---------------------------------------------------------------------------- shapes


def test_the_shipped_layers_are_read_whole() -> None:
    shapes = read_shapes(LAYERS)
    assert len(shapes) == 397
    assert {s.spec.op for s in shapes} == {"linear", "conv1d", "conv2d", "conv3d"}
    (repeated,) = [s for s in shapes if s.net == "resnet_50" and s.count == 4][:1]
    assert (repeated.spec.in_channels, repeated.spec.out_channels) == (64, 256)
    probes = read_shapes(PROBES)
    assert {s.net for s in probes} == {PROBES_NET}
    assert not {s.spec for s in probes} & {s.spec for s in shapes}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"empty; its header must be op,net"),
        (f"{HEADER}\n", "no shapes below the header"),
        (f"{HEADER.replace(',ic', '')}\n", r":1: no column 'ic'"),
        (f"{HEADER}\n{CONV_LINE.replace('conv2d', 'conv9d')}\n", r":2: column op: 'conv9d'"),
        (f"{HEADER}\n{CONV_LINE.replace(',8,8,', ',8,-8,')}\n", r":2: column oc: '-8' is no whole"),
        (f"{HEADER}\n{CONV_LINE.replace(',1,8,8,', ',3,8,8,')}\n", r":2: column ic: 8 channels"),
        (f"{HEADER}\n{CONV_LINE.replace(',6,6,', ',1,1,').replace('1,1,,1,1,,1', '1,1,,0,0,,1')}\n",
         r":2: column ih: .* leaves no output"),
        (f"{HEADER}\n{CONV_LINE},7\n", r":2: 22 cells where the header has 21"),
        (f"{HEADER}\n\n{CONV_LINE.replace(',,3,3', ',3,3,3')}\n", r":3: column kd: a conv2d has"),
    ],
)  # fmt: skip
def test_senseless_shapes_are_refused_with_their_line(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(MeasurementError, match=words) as caught:
        read_shapes(path)
    assert str(path) in str(caught.value)


def test_unreadable_shapes(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="cannot be read: No such file"):
        read_shapes(tmp_path / "none.csv")


def test_selecting_what_is_not_there_names_what_is_near(shapes_csv: Path) -> None:
    shapes = read_shapes(shapes_csv)
    assert [s.spec.op for s in select(shapes, ops=["linear"])] == ["linear"]
    with pytest.raises(InvalidInputError, match=r"no shape has the network 'tine'.*tiny"):
        select(shapes, nets=["tine"])


def test_jobs_are_shapes_times_sizes_and_share_operands(shapes_csv: Path) -> None:
    grid = Grid(threads=(1, 2), batches=(1, 8), rows=(4,), post_ops=(None, "lut"))
    found = jobs(read_shapes(shapes_csv), grid, machine="m", isa="avx2")
    assert all(len({c.spec for c in job}) == 1 for job in found)
    cases = [c for job in found for c in job]
    assert len(set(cases)) == len(cases)
    # conv: 2 batches x 2 threads x (2 callers + lut in graphs only) x 2 caches, linear: static
    # alike, dynamic without a table only.
    assert len(cases) == 2 * 2 * 3 * 2 + (2 * 3 * 2 + 2 * 2 * 2)
    batches = [job[0].spec.batch for job in found if job[0].spec.op == "conv2d"]
    assert batches == [1] * 4 + [8] * 4
    assert supports("graph", LINEAR.replace(dynamic=True))
    assert not supports("graph", LINEAR.replace(dynamic=True, post_op="add"))


def test_a_shape_that_occurs_twice_is_measured_once_and_counted() -> None:
    spec = CONV.replace(batch=None, rows=None, dynamic=None, threads=None)
    grid = Grid(callers=("stock",), batches=(1,), caches=("hot",))
    ((one,),) = jobs([Shape(spec, "a", 2), Shape(spec, "b"), Shape(spec, "a")], grid,
                     machine="m", isa="avx2")  # fmt: skip
    assert one.nets == (("a", 3), ("b", 1))


def test_an_embedding_table_is_measured_at_every_number_of_bags_lookups_and_bits() -> None:
    tables = read_shapes(EMBEDDINGS)
    assert {s.spec.op for s in tables} == {"embedding_bag"}
    assert len({s.net for s in tables}) > 5
    one = next(s for s in tables if s.spec.out_channels == 300)  # 2 bits fill no bytes of 3
    grid = Grid(bags=(1, 64), each=(1, 20), bits=(8, 4, 2), caches=("hot",))
    cases = [c for job in jobs([one], grid, machine="m", isa="avx2") for c in job]
    # Compiled models have 2 bits too; the stock modules have not.
    assert len(cases) == len(set(cases)) == 2 * 2 * (3 + 2)
    assert {c.spec.bits for c in cases if c.caller == "stock"} == {8, 4}
    odd = Shape(one.spec.replace(out_channels=30), "net")
    assert {job[0].spec.bits for job in jobs([odd], grid, machine="m", isa="avx2")} == {8, 4}


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_every_lookup_kernel_is_right_and_timed(bits: int) -> None:
    spec = lookup_spec(50, 24, bits, "sum", stock_rows=True, caller=None).replace(
        rows=6, each=3, threads=1
    )
    callers = ("stock", "graph") if bits != 2 else ("graph",)
    cases = [case(spec, caller=caller, cache=cache)
             for caller in callers for cache in ("hot", "rotated")]  # fmt: skip
    found = measure.measure(cases, limit=0.01)
    assert {(m.case, m.kernel_name): (m.status, m.note) for m in found} == {
        (one, kernel): ("ok", "") for one in cases for kernel in ("native", "fbgemm")
    }


def test_a_wrong_lookup_is_told() -> None:
    spec = lookup_spec(50, 24, 4, "sum", stock_rows=True, caller=None).replace(
        rows=6, each=3, threads=1
    )
    operands = make_lookup(spec)
    indices, _ = operands.call(0)
    right = operands.weight[indices].view(6, 3, 24).sum(1)
    assert operands.difference(right) is None
    assert operands.difference(right[:5]) == "the result has shape (5, 24)"
    right[5, 23] += 0.1
    assert "of the largest result" in str(operands.difference(right))


def test_the_layers_of_a_model_with_their_sizes() -> None:
    found = {shape.spec.op + str(shape.spec.out_channels): shape for shape in
             model_shapes(Net(), "net", (2, 3, 16, 16))}  # fmt: skip
    assert found["conv2d8"].spec.batch == 2
    twice = [s for s in found.values() if s.count == 2]
    assert [(s.spec.padding, s.spec.spatial) for s in twice] == [((1, 1), (8, 8))]
    assert found["conv2d4"].spec.transposed
    assert found["linear5"].spec.rows == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:make", "No module named"),
        ("math:nothing", "no attribute"),
        ("math:pi", "no function"),
        ("math:sqrt", "cannot be called without arguments"),
        ("builtins:dict", "got a dict, not an nn.Module"),
    ],
)
def test_models_that_are_none(name: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        load_model(name)


def test_a_model_that_does_not_run_says_how_to_give_its_input() -> None:
    with pytest.raises(InvalidInputError, match=r"net does not run .*--shape"):
        model_shapes(Net(), "net", (1, 4, 16, 16))
    with pytest.raises(InvalidInputError, match="runs no convolution or linear"):
        model_shapes(nn.ReLU(), "relu", (1, 4))


# ---------------------------------------------------------------------------- operands


SPECS: list[OpSpec] = [
    CONV,
    CONV.replace(post_op="relu"),
    CONV.replace(post_op="add"),
    CONV.replace(post_op="lut"),
    CONV.replace(groups=8, stride=(2, 2)),
    with_rows(CONV.replace(transposed=True, per_channel=False, stride=(2, 2))),
    LINEAR,
    LINEAR.replace(post_op="relu"),
    LINEAR.replace(dynamic=True),
    LINEAR.replace(dynamic=True, post_op="relu"),
    LINEAR.replace(dynamic=True, rows=1),
    LINEAR.replace(dynamic=True, in_channels=1),
    OpSpec("conv1d", 8, 8, 1, (3,), (1,), (1,), (1,), (0,), dynamic=False, batch=2, rows=20,
           spatial=(10,), threads=1),
    OpSpec("conv3d", 8, 8, 1, (3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (0,) * 3, dynamic=False,
           batch=1, rows=64, spatial=(4,) * 3, threads=1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("caller", "spec"),
    [(caller, spec) for caller in get_args(Caller) for spec in SPECS if supports(caller, spec)],
    ids=str,
)
def test_every_kernel_that_accepts_an_op_computes_it(caller: Caller, spec: OpSpec) -> None:
    found = candidates(caller, functools.cache(functools.partial(make_operands, spec)))
    in_graphs = dynamic_kernels() if spec.dynamic else graph_kernels()
    registry = in_graphs if caller == "graph" else all_kernels()
    assert [c.name for c in found[: len(registry)]] == list(registry)
    # Without VNNI, some run once more with the narrow weights that others need.
    for again in found[len(registry) :]:
        assert again.narrow
        assert registry[again.name].quicker_with_narrow_weights(cpu())
    ran = 0
    for candidate in found:
        if candidate.make is None:
            assert candidate.note
            continue
        runner = candidate.make()
        runner.spread(2)
        assert candidate.operands is not None
        assert candidate.operands.difference(runner.result()) is None, candidate.name
        assert runner.seconds(3, rotated=True) > 0
        ran += 1
    assert ran


def test_two_steps_off_anywhere_are_seen() -> None:
    operands = make_operands(CONV)
    ((_, expected),) = operands.expected
    assert expected.shape == result_shape(CONV)
    assert operands.difference(expected) is None
    for at in ((0, 0, 0, 0), (0, 7, 5, 5), (0, 3, 2, 4)):
        wrong = expected.clone()
        wrong[at] = 0 if wrong[at] > 2 else 5
        assert "steps of the output scale" in str(operands.difference(wrong))
    assert "has shape" in str(operands.difference(expected[:, 1:]))


def test_of_a_big_op_the_ends_and_the_middle_are_looked_at() -> None:
    big = with_rows(CONV.replace(in_channels=64, out_channels=64, spatial=(60, 60)))
    operands = make_operands(big)
    rows = [window[2] for window, _ in operands.expected]
    assert (rows[0].start, rows[-1].stop) == (0, 60)
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("text", "expected"), [("15m", 900), ("90s", 90), ("1.5h", 5400), ("600", 600)]
)
def test_times(text: str, expected: float) -> None:
    assert tune.seconds(text) == expected


@pytest.mark.parametrize("text", ["", "m", "-5m", "5 minutes", "1e3"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no time"):
        tune.seconds(text)


def test_all_levels_are_those_this_cpu_reaches() -> None:
    parser = argparse.ArgumentParser()
    tune.configure(parser)
    levels = tune._levels(parser.parse_args(["--isa", "all"]).isa, cpu())
    assert levels == tuple(level for level in isa.LEVELS if isa.has(level))
    assert tune._levels(None, cpu()) == (cpu().isa,)
