"""Tuning: what is measured, how it is timed and checked, and that nothing measured is lost."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from tests import isa
from x86quant import cli
from x86quant.cli import tune
from x86quant.errors import InvalidInputError, MeasurementError, TuningError
from x86quant.hardware.cpu import cpu
from x86quant.kernels import all_kernels, dynamic_kernels, graph_kernels, kernel_names
from x86quant.packing.linear_dynamic import choose_linear_dynamic
from x86quant.routing.in_force import use_rules
from x86quant.spec import OpSpec, lookup_spec
from x86quant.tables.table_reader import read_table
from x86quant.terminal import progress
from x86quant.tuning import journal, measure, quiet, ranking, session, user_table
from x86quant.tuning.candidates import Candidate, MakeOperands, candidates
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
from x86quant.tuning.measurement_files import PROVENANCE, read
from x86quant.tuning.measurements import Caller, Case, Measurement
from x86quant.tuning.model_shapes import load_model, model_shapes
from x86quant.tuning.operands import FULL, make_operands, result_shape
from x86quant.tuning.provenance import provenance, this_machine
from x86quant.tuning.samples import PROBES_NET
from x86quant.tuning.worker import Worker

FAKE_WORKER = Path(__file__).parents[1] / "fake_tuning_worker.py"
HEADER = "op,net,layer,groups,ic,oc,id,ih,iw,kd,kh,kw,sd,sh,sw,pd,ph,pw,dd,dh,dw"
CONV_LINE = "conv2d,tiny,tiny:one*3,1,8,8,,6,6,,3,3,,1,1,,1,1,,1,1"
LINEAR_LINE = "linear,tiny,tiny:two,1,16,8,,,,,,,,,,,,,,,"

CONV = with_rows(
    OpSpec(
        "conv2d",
        8,
        8,
        1,
        (3, 3),
        (1, 1),
        (1, 1),
        (1, 1),
        (0, 0),
        dynamic=False,
        batch=1,
        spatial=(6, 6),
        threads=1,
    )
)
LINEAR = OpSpec("linear", 16, 8, dynamic=False, rows=4, threads=1)


@pytest.fixture
def shapes_csv(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.csv"
    path.write_text(f"{HEADER}\n{CONV_LINE}\n{LINEAR_LINE}\n")
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def case(spec: OpSpec = CONV, **changes: object) -> Case:
    made = Case(this_machine(), "avx2", "stock", spec, "hot", (("tiny", 3),))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- shapes


def test_the_shipped_layers_are_read_whole() -> None:
    shapes = read_shapes(LAYERS)
    assert len(shapes) == 392
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


# ---------------------------------------------------------------------------- models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding="same")
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.first(x)))
        return self.last(self.up(x).mean((2, 3)))


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


# ---------------------------------------------------------------------------- ranking


class Machine:
    """A clock, and calls that move it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: dict[str, int] = {}

    def block(self, name: str, *seconds: float) -> Callable[[int], float]:
        """Calls that take these times in turn."""

        def run(calls: int) -> float:
            count = self.calls[name] = self.calls.get(name, 0) + 1
            taken = seconds[count % len(seconds)]
            self.now += taken * calls
            return taken

        return run

    def settle(self, limit: float = 100.0, **blocks: tuple[float, ...]) -> dict[str, ranking.Timed]:
        return ranking.settle(
            {name: self.block(name, *times) for name, times in blocks.items()},
            limit=limit,
            clock=lambda: self.now,
        )


def test_a_clear_ranking_is_settled_after_few_rounds() -> None:
    found = Machine().settle(fast=(1e-4, 1.01e-4), slow=(1.5e-4, 1.52e-4))
    assert found["fast"].rounds == found["slow"].rounds == 9
    assert ranking.ties(found) == frozenset()


def test_noise_is_measured_longer_and_overlap_is_a_tie() -> None:
    found = Machine().settle(a=(1e-4, 1.3e-4), b=(1.08e-4, 1.4e-4))
    assert found["a"].rounds == 61
    assert ranking.ties(found) == {"a", "b"}


def test_three_percent_is_a_tie_whatever_the_precision() -> None:
    found = Machine().settle(a=(1e-4,), b=(1.02e-4,), c=(1.05e-4,))
    assert found["a"].rounds == 9
    assert ranking.ties(found) == {"a", "b"}


def test_a_hopeless_kernel_is_not_timed_again() -> None:
    machine = Machine()
    found = machine.settle(fast=(1e-4,), hopeless=(2e-3,))
    assert found["hopeless"].rounds == 1
    assert machine.calls["hopeless"] == 2
    found = Machine().settle(fast=(1e-4,), slow=(3e-4,), near=(1.3e-4,))
    assert (found["slow"].rounds, found["near"].rounds) == (3, 9)


def test_one_stall_does_not_make_a_kernel_hopeless() -> None:
    stalled = [0.02, *[1e-4] * 99]
    found = Machine().settle(steady=(1.5e-4,), stalled=(stalled[-1], *stalled[:-1]))
    assert found["stalled"].rounds == found["steady"].rounds == 9
    assert found["stalled"].median == 1e-4


def test_the_limit_ends_timing_but_everybody_is_timed() -> None:
    found = Machine().settle(limit=1e-9, a=(1e-3, 1.2e-3), b=(1e-3, 1.2e-3))
    assert {name: t.rounds for name, t in found.items()} == {"a": 1, "b": 1}


@pytest.mark.parametrize(("rounds", "outside"), [(1, 0), (5, 0), (6, 0), (9, 1), (20, 5), (61, 22)])
def test_the_interval_of_the_median_is_that_of_the_sign_test(rounds: int, outside: int) -> None:
    found = ranking.summary([float(n) for n in range(rounds)])
    assert (found.low, found.high) == (outside, rounds - 1 - outside)


# ---------------------------------------------------------------------------- measuring


class Runner:
    """Gives ``result``, or raises it, and always takes as long."""

    def __init__(self, result: torch.Tensor | Exception, taken: float) -> None:
        self._result, self._taken = result, taken
        self.copies = 1

    def result(self) -> torch.Tensor:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def spread(self, copies: int) -> None:
        self.copies = copies

    def seconds(self, calls: int, *, rotated: bool) -> float:
        return self._taken * (2 if rotated else 1)


def fake_candidates(caller: Caller, operands: MakeOperands) -> list[Candidate]:
    made = operands(FULL)
    ((_, right),) = made.expected
    wrong = right.clone()
    wrong[(-1,) * wrong.dim()] ^= 0x40

    def candidate(name: str, result: torch.Tensor | Exception, taken: float) -> Candidate:
        return Candidate(caller, name, lambda: Runner(result, taken), "ok", operands=made)

    return [
        candidate("right", right, 2e-4),
        candidate("wrong", wrong, 1e-4),
        candidate("broken", RuntimeError("no such\nprimitive"), 1e-4),
        Candidate(caller, "refusing", note="cannot"),
    ]


def by_kernel(found: list[Measurement], **fields: str) -> dict[str, Measurement]:
    return {
        m.kernel_name: m
        for m in found
        if all(getattr(m.case, name) == value for name, value in fields.items())
    }


def test_wrong_and_failing_kernels_are_recorded_not_timed() -> None:
    found = by_kernel(measure.measure([case()], limit=0.1, find=fake_candidates))
    assert {name: m.status for name, m in found.items()} == {
        "right": "ok", "wrong": "wrong", "broken": "failed", "refusing": "unsupported",
    }  # fmt: skip
    assert found["right"].median_us == pytest.approx(200)
    assert found["wrong"].median_us is None
    assert "steps of the output scale" in found["wrong"].note
    assert found["broken"].note == "RuntimeError: no such primitive"


def test_kernels_that_ended_the_process_are_left_out() -> None:
    found = measure.measure(
        [case()], limit=0.1, find=fake_candidates, excluded={("stock", "right"): "it died"}
    )
    assert (found[0].status, found[0].note) == ("failed", "it died")


def test_caches_are_timed_apart_unless_operands_overflow_them() -> None:
    both = [case(), case(cache="rotated")]
    found = measure.measure(both, limit=0.1, find=fake_candidates)
    assert by_kernel(found, cache="hot")["right"].median_us == pytest.approx(200)
    assert by_kernel(found, cache="rotated")["right"].median_us == pytest.approx(400)
    assert measure.copies_to_rotate(CONV) > 2
    huge = OpSpec("linear", 8192, 8192, rows=1, threads=1)
    assert measure.copies_to_rotate(huge) == 1


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    measure.measure([case(CONV.replace(threads=2))], limit=0.01, find=fake_candidates)
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------------- the process


def fake_worker(*kernels: str, patience: float = 60.0) -> Callable[[str], Worker]:
    command = [sys.executable, str(FAKE_WORKER), *kernels]
    return lambda level: Worker(level, command, patience)


def test_a_kernel_that_ends_the_process_is_recorded_and_the_rest_measured() -> None:
    with fake_worker("fast", "segfaults")("avx2") as worker:
        found = by_kernel(worker.measure([case()], 0.1))
        again = by_kernel(worker.measure([case(LINEAR)], 0.1))
    assert (found["fast"].status, found["fast"].median_us) == ("ok", pytest.approx(10))
    assert found["segfaults"].status == "failed"
    assert found["segfaults"].note == "the process died of SIGSEGV"
    assert again["fast"].status == "ok"


def test_a_kernel_that_hangs_is_given_up() -> None:
    with fake_worker("fast", "hangs", patience=1.5)("avx2") as worker:
        found = by_kernel(worker.measure([case()], 0.1))
    assert found["hangs"].note == "it did not finish within 2 s"
    assert found["fast"].status == "ok"


def test_a_process_that_ends_without_a_kernel_to_blame_is_an_error() -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('out of memory')"]
    with (
        Worker("avx2", words) as worker,
        pytest.raises(TuningError, match=r"(?s)exit status 1.*out of memory"),
    ):
        worker.measure([case()], 0.1)


# ---------------------------------------------------------------------------- journal and lock

HEAD = dict.fromkeys(PROVENANCE, "x")
TIMED = Measurement(case(), "onednn", "ok", 3.0, 2.5, 3.25, 2.0, rounds=9)
FAILED = Measurement(case(LINEAR), "fbgemm", "failed", note="died")


def test_a_torn_last_line_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with journal.Journal(path, HEAD, resume=False) as first:
        first.add([TIMED])
        first.add([FAILED])
    whole = path.read_bytes()
    for cut in range(1, len(whole), 9):
        path.write_bytes(whole[:-cut])
        with journal.Journal(path, HEAD, resume=True) as again:
            kept = again.measurements
            assert kept in ([TIMED], []), cut
            if kept:
                again.add([FAILED])
                assert path.read_bytes() == whole
            if not whole[:-cut].count(b"\n"):
                break


def test_a_journal_is_not_overwritten_and_not_mixed_with_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with journal.Journal(path, HEAD, resume=False) as first:
        first.add([TIMED])
    with pytest.raises(TuningError, match=r"unfinished run.*--resume"):
        journal.Journal(path, HEAD, resume=False)
    with pytest.raises(TuningError, match="measured with torch 'x', this is 'y'"):
        journal.Journal(path, HEAD | {"torch": "y"}, resume=True)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{]", lines[1], ""]))
    with pytest.raises(MeasurementError, match=r"j:2: damaged; delete"):
        journal.Journal(path, HEAD, resume=True)


def test_a_full_disk_is_said_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 40:
            return write(file, data[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    with journal.Journal(path, HEAD, resume=False) as first:
        first.add([TIMED])
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(TuningError, match=r"the disk is full.*--resume"):
            first.add([FAILED])
        monkeypatch.undo()
    assert path.read_bytes() == before


def test_the_lock_is_held_by_one(tmp_path: Path) -> None:
    out = tmp_path / "m.csv"
    with (
        journal.locked(out),
        pytest.raises(TuningError, match=rf"process {os.getpid()}\) is writing .*m.csv"),
        journal.locked(out),
    ):
        pass
    with journal.locked(out):
        pass


# ---------------------------------------------------------------------------- whole runs


def request(shapes_csv: Path, out: Path, **changes: object) -> session.Request:
    grid = Grid(callers=("stock",), batches=(1,), rows=(4,), dynamic=(False,), caches=("hot",))
    made = session.Request(read_shapes(shapes_csv), grid, ("avx2",), out)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


RUN = """
import sys
from pathlib import Path
from typing import get_args
from tests.tuning.test_tuning_measure import fake_worker, request
from x86quant.tuning import session
site = session.Site(worker=fake_worker("fast"))
session.run(request(Path(sys.argv[1]), Path(sys.argv[2])), site=site)
"""


def test_killed_at_any_moment_nothing_is_lost_and_resume_goes_on(
    tmp_path: Path, shapes_csv: Path
) -> None:
    out, hang = tmp_path / "m.csv", tmp_path / "hang"
    # The linear comes first; the convolution, of 8 channels, hangs.
    lines = shapes_csv.read_text().splitlines()
    shapes_csv.write_text("\n".join([lines[0], lines[2], lines[1], ""]))
    hang.touch()
    running = subprocess.Popen(
        [sys.executable, "-c", RUN, str(shapes_csv), str(out)],
        env={**os.environ, "FAKE_HANG": str(hang), "OMP_NUM_THREADS": "1"},
        cwd=FAKE_WORKER.parents[1],
        stderr=subprocess.DEVNULL,
    )
    journalled = session.journal_of(out)
    try:
        wait_until(lambda: journalled.exists() and journalled.read_bytes().count(b"\n") == 2)
        with pytest.raises(TuningError, match=f"process {running.pid}"):
            session.run(request(shapes_csv, out), site=session.Site(worker=fake_worker("fast")))
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    assert not out.exists()
    with pytest.raises(TuningError, match="unfinished run"):
        session.run(request(shapes_csv, out), site=session.Site(worker=fake_worker("fast")))

    # Another kernel now, so that what is old and what is new can be told apart.
    outcome = session.run(
        request(shapes_csv, out, resume=True), site=session.Site(worker=fake_worker("other"))
    )
    found = {m.case.spec.op: (m.kernel_name, m.status) for m in read(out)}
    assert found == {"linear": ("fast", "ok"), "conv2d": ("other", "ok")}
    assert outcome.unmeasured == 0
    assert not journalled.exists()


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


class InstantWorker:
    """Measures in no time; the clock moves ten seconds a job."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limits: list[float] = []
        self.levels: list[str] = []

    def __call__(self, level: str) -> InstantWorker:
        self.levels.append(level)
        return self

    def __enter__(self) -> InstantWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, cases: list[Case], limit: float) -> list[Measurement]:
        self.now += 10
        self.limits.append(limit)
        return [Measurement(c, "onednn", "ok", 3.0, 2.5, 3.25, 2.0, rounds=9) for c in cases]


_run = session.run


def run(asked: session.Request, worker: InstantWorker) -> session.Outcome:
    return _run(
        asked, site=session.Site(worker=worker), clock=lambda: worker.now, warn=lambda message: None  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_full_disk_at_the_end_keeps_what_was_measured(
    tmp_path: Path, shapes_csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    asked, worker = request(shapes_csv, tmp_path / "m.csv"), InstantWorker()
    with monkeypatch.context() as patch:
        patch.setattr(session, "write", full)
        with pytest.raises(TuningError, match=r"the disk is full.* go on with --resume"):
            run(asked, worker)
    measured = len(worker.limits)
    outcome = run(dataclasses.replace(asked, resume=True), worker)
    assert len(worker.limits) == measured  # nothing was measured again
    assert len(read(asked.out)) == len(outcome.measured) == 2


def test_the_budget_is_shared_between_levels_and_resume_does_the_rest(
    tmp_path: Path, shapes_csv: Path
) -> None:
    out = tmp_path / "m.csv"
    asked = request(shapes_csv, out, levels=("avx2", "avx512"), budget=20.0)
    outcome = run(asked, InstantWorker())
    assert (len(outcome.measured), outcome.unmeasured) == (2, 2)
    assert [m.case.isa for m in read(out)] == ["avx2", "avx512"]
    worker = InstantWorker()
    outcome = run(dataclasses.replace(asked, resume=True, budget=None), worker)
    assert (len(outcome.measured), outcome.unmeasured) == (4, 0)
    assert worker.now == 20


def test_less_budget_is_less_timing_for_each_case(tmp_path: Path, shapes_csv: Path) -> None:
    plenty, scarce = InstantWorker(), InstantWorker()
    run(request(shapes_csv, tmp_path / "a.csv", budget=1000.0), plenty)
    run(request(shapes_csv, tmp_path / "b.csv", budget=0.6), scarce)
    assert scarce.limits[0] < plenty.limits[0]


def test_a_new_run_replaces_its_file_and_the_users_own_file_accumulates(
    tmp_path: Path, shapes_csv: Path
) -> None:
    out = tmp_path / "m.csv"
    only_linear = select(read_shapes(shapes_csv), ops=["linear"])
    run(request(shapes_csv, out), InstantWorker())
    outcome = run(request(shapes_csv, out, shapes=only_linear, accumulate=True), InstantWorker())
    assert len(outcome.measured.cases()) == 2
    outcome = run(request(shapes_csv, out, shapes=only_linear), InstantWorker())
    assert len(outcome.measured.cases()) == len(read(out).cases()) == 1


def test_provenance_says_what_was_measured_with(tmp_path: Path, shapes_csv: Path) -> None:
    head = provenance(["avx2", "avx512"], [1, 2])
    assert head.keys() >= set(PROVENANCE)
    assert (head["isa"], head["threads"]) == ("avx2 | avx512", "1 | 2")
    assert head["torch"] == torch.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", head["onednn"])
    outcome = run(request(shapes_csv, tmp_path / "m.csv"), InstantWorker())
    assert re.match(r"(yes|no) \(jitter \d+%, waiting", outcome.measured.provenance["quiet"])


# ---------------------------------------------------------------------------- quiet, progress


def test_a_machine_is_quiet_unless_turns_wait_or_time_is_stolen() -> None:
    steady = [1.0] * 100
    calm = quiet.judge(steady, 100, 100, (0, 0), (0, 1000))
    assert calm.enough
    jittery = quiet.judge(steady[:80] + [1.5] * 20, 100, 100, (0, 0), (0, 1000))
    waiting = quiet.judge(steady, 100, 60, (0, 0), (0, 1000))
    stolen = quiet.judge(steady, 100, 100, (0, 0), (100, 1000))
    assert [q.enough for q in (jittery, waiting, stolen)] == [False] * 3
    assert str(calm.worse(stolen)) == "no (jitter 0%, waiting 0%, stolen 10%)"


def test_progress_says_the_time_left() -> None:
    now, stream = [0.0], io.StringIO()
    bar = progress.Progress(100, "avx2", stream=stream, clock=lambda: now[0], deadline=150.0)
    assert bar.left() is None
    now[0] = 40.0
    bar.advance(25, "conv")
    assert bar.left() == 110  # 120 by the pace, but the budget ends before
    assert stream.getvalue() == "avx2 [######                  ]  25% 1:50 left  conv\n"


# ---------------------------------------------------------------------------- the user's table


def graph(spec: OpSpec, kernel: str, median: float) -> Measurement:
    return Measurement(case(spec, caller="graph", isa=cpu().isa), kernel, "ok",
                       median, median, median, median, rounds=9)  # fmt: skip


def stock(spec: OpSpec, kernel: str, median: float, cache: str = "hot") -> Measurement:
    of = case(spec, isa=cpu().isa, cache=cache)
    return dataclasses.replace(graph(spec, kernel, median), case=of)


def test_entries_rank_kernels_over_both_caches_and_leave_out_wrong_ones() -> None:
    (entry,) = user_table.entries([
        stock(CONV, "onednn", 10), stock(CONV, "fbgemm", 12),
        stock(CONV, "onednn", 30, "rotated"), stock(CONV, "fbgemm", 14, "rotated"),
        stock(CONV, "qnnpack", 1),
        Measurement(case(CONV, isa=cpu().isa, cache="rotated"), "qnnpack", "wrong", note="off"),
    ])  # fmt: skip
    assert entry.use == ("fbgemm", "onednn")
    assert (entry.spec.rows, entry.spec.batch, entry.spec.dynamic) == (None, None, None)
    assert entry.because == "measured: 13.0 µs, onednn 17.3"


def test_stock_entries_tell_rows_apart_only_where_the_best_kernel_differs() -> None:
    few, many = LINEAR, LINEAR.replace(rows=64)
    measured = [stock(few, "fbgemm", 1), stock(few, "onednn", 2), stock(many, "onednn", 5)]
    differing = user_table.entries([*measured, stock(many, "fbgemm", 9)])
    assert [(e.spec.rows, e.use[0]) for e in differing] == [(4, "fbgemm"), (64, "onednn")]
    alike = user_table.entries([*measured, stock(many, "fbgemm", 4)])
    assert [(e.spec.rows, e.use[0]) for e in alike] == [(None, "fbgemm")]


def test_entries_of_compiled_models_come_first_and_are_exact() -> None:
    found = user_table.entries([stock(CONV, "onednn", 3), graph(CONV, "native", 1)])
    assert [(e.spec.caller, e.spec.rows, e.use) for e in found] == [
        ("graph", 36, ("native",)), ("stock", None, ("onednn",)),
    ]  # fmt: skip


def test_linears_on_float_tensors_find_what_was_measured_of_them() -> None:
    one, several = (LINEAR.replace(dynamic=True, rows=rows) for rows in (1, 4))
    measured = [graph(one, "onednn", 1), graph(one, "native", 2), graph(several, "native", 3)]
    path = user_table.install(user_table.with_entries(measured, cpu()), cpu())
    weight = torch.ones(LINEAR.out_channels, LINEAR.in_channels, dtype=torch.int8)
    with use_rules(path):
        scale = bias = torch.zeros(LINEAR.out_channels)
        routes = choose_linear_dynamic(weight, scale, bias, None)
    assert [choice.kernel for choice in routes.choices][:2] == ["onednn", "native"]
    assert routes.choices[0].rule.partition("#")[0].endswith(":entry")


def test_the_users_table_is_read_back_and_keeps_other_entries() -> None:
    path = user_table.install(user_table.with_entries([stock(CONV, "onednn", 3)], cpu()), cpu())
    table = read_table(path, kernel_names())
    assert table.fits(cpu())
    assert [e.use for e in table.entries] == [("onednn",)]
    more = user_table.with_entries([stock(LINEAR, "fbgemm", 3), stock(CONV, "fbgemm", 1)], cpu())
    found = {e.spec.op: e.use for e in more.entries}
    assert found == {"conv2d": ("fbgemm",), "linear": ("fbgemm",)}
    assert len(more.entries) == 2
    path.write_text("broken")
    assert user_table.with_entries([], cpu()).base is not None


def test_tuning_one_model_again_replaces_its_entries() -> None:
    """Also those of transposed layers, whose weights have one scale for all channels."""
    up = CONV.replace(transposed=True, per_channel=False, output_padding=(0, 0))
    for took in (3, 2, 1):
        measured = [stock(up, "onednn", took), graph(up, "native", took), stock(CONV, "fbgemm", 1)]
        table = user_table.with_entries(measured, cpu())
        path = user_table.install(table, cpu())
        assert read_table(path, kernel_names()) == table
        assert len(table.entries) == 3
        assert f"measured: {took}.0 µs" in {entry.because for entry in table.entries}


def test_tuning_again_replaces_a_denial_whose_reason_changes() -> None:
    for note in ("2 steps off", "9 steps off"):
        wrong = [
            Measurement(case(CONV, isa=cpu().isa, caller=caller), "onednn", "wrong", note=note)
            for caller in ("stock", "graph")
        ]
        path = user_table.install(user_table.with_entries(wrong, cpu()), cpu())
        denials = read_table(path, kernel_names()).denials
        assert [(d.spec.caller, d.because) for d in denials] == [("graph", note), ("stock", note)]


# ---------------------------------------------------------------------------- command line


def test_tune_measures_at_a_lower_level_and_writes_a_file(
    tmp_path: Path, shapes_csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.csv"
    status = cli.main(
        ["tune", "--shapes", str(shapes_csv), "--out", str(out), "--isa", "avx2", "--batch", "1",
         "--rows", "4", "--budget", "1h", "--json"]
    )  # fmt: skip
    assert status == 0
    found = read(out)
    assert {m.case.isa for m in found} == {"avx2"}
    assert {m.case.caller for m in found} == {"stock", "graph"}
    assert {m.case.cache for m in found} == {"hot", "rotated"}
    assert not [m for m in found if m.status in ("wrong", "failed")]
    onednn = [m for m in found if (m.kernel_name, m.case.caller) == ("onednn", "stock")]
    assert all(m.narrow_weights for m in onednn)  # without VNNI it saturates at full range
    assert onednn
    # Where others need narrow weights, native is timed with them too, as it is quicker then.
    native = [m for m in found if (m.kernel_name, m.status) == ("native", "ok")]
    need = {m.case for m in found if m.narrow_weights and m.kernel_name != "native"}
    assert {m.case for m in native if m.narrow_weights} == need & {m.case for m in native} != set()
    printed = json.loads(capsys.readouterr().out)
    assert (printed["cases"], printed["unmeasured"]) == (len(found.cases()), 0)
    assert printed["bad"] == printed["tables"] == []
    assert not user_table.user_table_path("avx2").exists()


def test_tune_says_what_is_wrong_with_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"{HEADER}\n{CONV_LINE.replace(',1,8,8,', ',0,8,8,')}\n")
    assert cli.main(["tune", "--shapes", str(path), "--out", str(tmp_path / "m.csv")]) == 2
    assert "bad.csv:2: column groups: 0 is too small" in capsys.readouterr().err
    assert cli.main(["tune", "--shape", "1,3,8,8"]) == 2
    assert "--shape is the input of a --model" in capsys.readouterr().err


def test_a_model_becomes_entries_of_the_users_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "run", functools.partial(run, worker=InstantWorker()))
    name = f"{Net.__module__}:Net"
    status = cli.main(["tune", "--model", name, "--shape", "1,3,16,16", "--isa", "avx2"])
    assert status == 0
    table = read_table(user_table.user_table_path("avx2"), all_kernels())
    assert {e.spec.op for e in table.entries} == {"conv2d", "linear"}
    assert f"{user_table.user_table_path('avx2')}: installed" in capsys.readouterr().out


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
