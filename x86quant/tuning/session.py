"""One run of tuning: every case at every ISA level, journalled, until done or out of time."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from x86quant.terminal.progress import Progress
from x86quant.tuning.cases import Grid, Shape, jobs
from x86quant.tuning.journal import Journal, check_same, locked, writing_failed
from x86quant.tuning.measurement_files import read, write
from x86quant.tuning.measurements import Case, Measurement, MeasurementSet, merge
from x86quant.tuning.provenance import provenance, this_machine
from x86quant.tuning.quiet import Quiet, look
from x86quant.tuning.worker import Worker

# Seconds of timing for one case: what is left of the budget divides among what is left to do,
# within these.
_USUAL_LIMIT = 0.4
_LEAST_LIMIT = 0.05
# A job's fixed time in terms of work: packing, checking and looking at memory take about as long
# as this many multiply-adds in every kernel.
_FIXED_WORK = 3 * 10**8

Job = tuple[Case, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """What to tune.

    Attributes:
        shapes: the layers.
        grid: what each is measured with.
        levels: the ISA levels.
        out: the CSV file to write; its journal and lock lie beside it.
        budget: seconds after which to stop; None is no limit.
        resume: go on with the journal, or the CSV file, that is there.
        accumulate: what the CSV file holds already stays in it.
    """

    shapes: tuple[Shape, ...]
    grid: Grid
    levels: tuple[str, ...]
    out: Path
    budget: float | None = None
    resume: bool = False
    accumulate: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        measured: everything in the CSV file now.
        unmeasured: cases that the budget left out.
        quiet: the worst look at the machine.
        seconds: how long it took.
    """

    measured: MeasurementSet
    unmeasured: int
    quiet: Quiet
    seconds: float

    def of_status(self, *statuses: str) -> tuple[Measurement, ...]:
        """The measurements with one of these statuses."""
        return tuple(m for m in self.measured if m.status in statuses)


class Measurer(Protocol):
    """What measures at one ISA level, as ``worker.Worker`` does."""

    def __enter__(self) -> Measurer: ...

    def __exit__(self, *_: object) -> None: ...

    def measure(self, cases: Sequence[Case], limit: float) -> list[Measurement]:
        """Measure cases of one op."""


@dataclasses.dataclass(frozen=True)
class Site:
    """The machine that is measured: this one, unless said otherwise.

    Attributes:
        machine: the class of its CPU, as cases name it.
        provenance: the head of the file, for ISA levels and numbers of threads.
        look: is it quiet?
        worker: starts what measures at an ISA level.
        name: what the user knows it by; nothing for this machine.
    """

    machine: Callable[[], str] = this_machine
    provenance: Callable[[Sequence[str], Sequence[int]], dict[str, str]] = provenance
    look: Callable[[], Quiet] = look
    worker: Callable[[str], Measurer] = Worker
    name: str = ""


HERE = Site()


def journal_of(out: Path) -> Path:
    """Where a run into ``out`` keeps its journal."""
    return out.with_name(f"{out.name}.journal")


def run(
    request: Request,
    *,
    site: Site = HERE,
    clock: Callable[[], float] = time.monotonic,
    warn: Callable[[str], None] = lambda message: print(message, file=sys.stderr),
) -> Outcome:
    """Measure, and write the CSV file.

    Args:
        request: what to measure.
        site: the machine that is measured.
        clock: seconds.
        warn: told at once when the machine is too busy for times to mean much.

    Raises:
        TuningError: another tune writes the same file, there is an unfinished one, the disk is
            full, or what is there was measured otherwise.
    """
    start = clock()
    head = site.provenance(request.levels, request.grid.threads)
    with locked(request.out):
        earlier = _earlier(request, head)
        with Journal(journal_of(request.out), head, resume=request.resume) as journal:
            known = {m.case for m in journal.measurements}
            if request.resume and earlier is not None:
                known |= {m.case for m in earlier}
            quiet = site.look()
            if not quiet.enough:
                warn(f"the machine is not quiet: {quiet}; stop other work for times that hold")
            unmeasured = 0
            for number, level in enumerate(request.levels):
                deadline = None
                if request.budget is not None:
                    left = request.budget - (clock() - start)
                    deadline = clock() + left / (len(request.levels) - number)
                todo = _todo(request, site.machine(), level, known)
                unmeasured += _measure_level(level, todo, journal, site, deadline, clock)
            quiet = quiet.worse(site.look())
            head |= {"quiet": str(quiet)}
            measured = _written(request, MeasurementSet(tuple(journal.measurements), head), earlier)
        if not unmeasured:
            journal_of(request.out).unlink()
    return Outcome(measured, unmeasured, quiet, clock() - start)


def _earlier(request: Request, head: dict[str, str]) -> MeasurementSet | None:
    """What the CSV file holds already, where that counts."""
    if not (request.resume or request.accumulate) or not request.out.exists():
        return None
    found = read(request.out)
    check_same(found.provenance, head, str(request.out))
    return found


def _todo(request: Request, machine: str, level: str, known: set[Case]) -> tuple[Job, ...]:
    every = jobs(request.shapes, request.grid, machine=machine, isa=level)
    left = (tuple(case for case in job if case not in known) for job in every)
    return tuple(job for job in left if job)


def _measure_level(
    level: str,
    todo: Sequence[Job],
    journal: Journal,
    site: Site,
    deadline: float | None,
    clock: Callable[[], float],
) -> int:
    """Measure until done or ``deadline``; the number of cases left out."""
    what = f"{site.name} at {level}" if site.name else level
    progress = Progress(sum(map(_work, todo)), what, clock=clock, deadline=deadline)
    with site.worker(level) as process:
        for number, job in enumerate(todo):
            rest = todo[number:]
            if deadline is not None and clock() >= deadline:
                progress.finish("out of time")
                return sum(map(len, rest))
            limit = _limit(None if deadline is None else deadline - clock(), rest)
            journal.add(process.measure(job, limit))
            progress.advance(_work(job), str(job[0].spec))
    progress.finish("done")
    return 0


def _work(job: Job) -> float:
    return _FIXED_WORK + float(job[0].spec.multiply_adds or 0)


def _limit(left: float | None, rest: Iterable[Job]) -> float:
    if left is None:
        return _USUAL_LIMIT
    # Checking and packing take about half of the time.
    share = left / sum(map(len, rest)) / 2
    return min(max(share, _LEAST_LIMIT), _USUAL_LIMIT)


def _written(
    request: Request, measured: MeasurementSet, earlier: MeasurementSet | None
) -> MeasurementSet:
    if earlier is not None:
        measured = merge([earlier, measured])
    try:
        write(request.out, measured)
    except OSError as error:
        raise writing_failed(request.out, error) from error
    return measured
