"""Runs of tuning: nothing measured is lost, and what is written says how it came to be."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tuning.small_runs import (
    FAKE_WORKER,
    LINEAR,
    InstantWorker,
    _own_cache,
    case,
    fake_worker,
    run,
    shapes_csv,
)
from x86quant.errors import MeasurementError, TuningError
from x86quant.tuning import journal, session
from x86quant.tuning.cases import (
    Grid,
    read_shapes,
    select,
)
from x86quant.tuning.measurement_files import PROVENANCE, read
from x86quant.tuning.measurements import Measurement
from x86quant.tuning.provenance import provenance

__all__ = ["_own_cache", "shapes_csv"]

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
from tests.tuning.small_runs import fake_worker
from tests.tuning.test_runs import request
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
        (worker,) = [child for child, parent in _running().items() if parent == running.pid]
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    wait_until(lambda: worker not in _running())  # though its kernel hangs
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


def _running() -> dict[int, int]:
    """The parent of each process that has not ended."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ends just now
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                found[int(stat.parent.name)] = int(parent)
    return found


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


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
