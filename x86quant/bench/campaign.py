"""Many models at many settings: each in a process of its own, each kept as soon as it is done."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from x86quant.bench import backends
from x86quant.bench.one_model import STAGE_BYTES, BenchRequest, Stage
from x86quant.bench.results import (
    RESULTS_FILE,
    BenchResults,
    ModelRun,
    RunSetting,
    read_results,
    run_from,
)
from x86quant.errors import InvalidInputError
from x86quant.files import check_target, write_aside
from x86quant.hardware import isa
from x86quant.hardware.cpu import cpu

WORKER = (sys.executable, "-m", "x86quant.bench.one_model")
HEARTBEAT_SECONDS = 15
#: Seconds that one back end may prepare.
PATIENCE = 900.0
# Variables that change what is measured.
_FLAGS = (isa.VARIABLE, "X86QUANT_RULES", "OMP_WAIT_POLICY", "LD_PRELOAD", "MALLOC_CONF")

Measure = Callable[[BenchRequest], ModelRun]


def worker_environment(setting: RunSetting, folder: Path) -> dict[str, str]:
    """The measuring process's: libraries read these before or when they load."""
    variables = dict(os.environ)
    variables["OMP_NUM_THREADS"] = str(setting.threads)
    variables["TMPDIR"] = str(folder)  # what it leaves behind goes with it
    if setting.isa is not None:
        variables[isa.VARIABLE] = setting.isa
        variables.update(isa.LEVELS[setting.isa].environment)
        # The older name, for a library with an older oneDNN in it.
        variables["DNNL_MAX_CPU_ISA"] = variables["ONEDNN_MAX_CPU_ISA"]
    return variables


def measure_apart(
    request: BenchRequest, *, longest: float = PATIENCE, worker: Sequence[str] = WORKER
) -> ModelRun:
    """Measure one model, as often as back ends take the process down, each time without those.

    Args:
        request: what to measure.
        longest: seconds one back end may prepare.
        worker: the command to start; REQUEST, RESULT and STAGE are appended.

    Returns:
        The run, which says so if the process failed outside any back end.
    """
    with tempfile.TemporaryDirectory(prefix="x86quant-bench-") as name:
        while True:
            folder = Path(tempfile.mkdtemp(dir=name))
            request_file, result, stage = (folder / part for part in ("request", "result", "stage"))
            request_file.write_text(request.to_json())
            stage.write_bytes(b" " * STAGE_BYTES)
            command = [*worker, str(request_file), str(result), str(stage)]
            ending = _run_worker(
                command, worker_environment(request.setting, folder), stage, longest
            )
            if result.exists():
                return run_from(json.loads(result.read_text()))
            what, backend = Stage.read(stage)
            if backend not in request.backends or backend in request.excluded:
                error = f"the measuring process {ending} while {what or 'starting'} {backend}"
                return ModelRun(request.name, request.setting, error=error.strip())
            reason = f"the process {ending} while {what}"
            request = dataclasses.replace(request, excluded={**request.excluded, backend: reason})
            print(f"  {backend}: FAILED {reason}; starting again without", file=sys.stderr)


def _run_worker(
    command: Sequence[str], variables: dict[str, str], stage: Path, longest: float
) -> str:
    """Run it to its end, saying now and then where it is; returns how it ended."""
    # A session of its own: compilers it has started die with it.
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        now, since, said = ("", ""), time.monotonic(), time.monotonic()
        while True:
            try:
                code = process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                pass
            else:
                return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            if (stage_now := Stage.read(stage)) != now:
                now, since = stage_now, time.monotonic()
            lasted = time.monotonic() - since
            if now[0] == "preparing" and lasted > longest:
                return f"took longer than {longest:.0f} s"
            if time.monotonic() - said > HEARTBEAT_SECONDS:
                said = time.monotonic()
                what, name = now
                print(f"  ... {name}: {what}, {lasted:.0f} s", file=sys.stderr, flush=True)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_folder(folder: Path) -> None:
    """Make the folder for the results, and see that files can be written there.

    Raises:
        InvalidInputError: they cannot; nothing has been measured yet.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_target(folder / RESULTS_FILE, "--out")
        probe = folder / f".{RESULTS_FILE}.probe"
        write_aside(probe, b"x" * 65536)
        probe.unlink()
    except OSError as error:
        raise InvalidInputError(f"--out: {folder} cannot be written: {error.strerror}") from error


def run_campaign(
    requests: Sequence[BenchRequest],
    measure: Measure,
    *,
    folder: Path | None = None,
    resume: bool = False,
    done: Callable[[BenchResults], object] = lambda results: None,
) -> BenchResults:
    """Measure all of ``requests``, keeping ``results.json`` up to date.

    Args:
        requests: in the order to measure.
        measure: how one is measured.
        folder: where results are kept; nowhere if None.
        resume: keep what the file in the folder has of these requests, and of other models.
        done: called after each model with what there is so far.

    Raises:
        InvalidInputError: the file to go on with was measured in another way.
    """
    rounds = requests[0].rounds
    results = BenchResults(environment(requests), rounds)
    if resume and folder is not None and (folder / RESULTS_FILE).exists():
        before = read_results(folder / RESULTS_FILE)
        _check_same(before, results, folder)
        known = {**before.environment, **results.environment}
        results = dataclasses.replace(results, environment=known, runs=before.runs)
    for number, request in enumerate(requests, 1):
        where = f"[{number}/{len(requests)}] {request.name}, {request.setting}"
        if any(_answers(run, request) for run in results.runs):
            print(f"{where}: kept", file=sys.stderr)
            continue
        print(where, file=sys.stderr, flush=True)
        run = measure(request)
        if run.error:
            print(f"  FAILED {run.error}", file=sys.stderr)
        kept = [r for r in results.runs if (r.model, r.setting) != (run.model, run.setting)]
        results = dataclasses.replace(results, runs=(*kept, run))
        try:
            if folder is not None:
                write_aside(folder / RESULTS_FILE, results.to_json())
            done(results)
        except OSError as error:  # the disk is full, say: the caller prints what there is
            print(f"  the results so far could not be written: {error}", file=sys.stderr)
    return results


def _answers(run: ModelRun, request: BenchRequest) -> bool:
    return (
        (run.model, run.setting, run.inputs) == (request.name, request.setting, request.shapes)
        and not run.error
        and set(request.backends) == set(run.results)
    )


def _check_same(before: BenchResults, now: BenchResults, folder: Path) -> None:
    differing = [f"rounds were {before.rounds}, are {now.rounds}"] * (before.rounds != now.rounds)
    then, wanted = before.environment, now.environment
    differing += [
        f"{name} was {then[name]!r}, is {wanted[name]!r}"
        for name in sorted({*then} & {*wanted} - {"date", "command"})
        if then[name] != wanted[name]
    ]
    if differing:
        raise InvalidInputError(
            f"{folder} holds results measured in another way ({'; '.join(differing)}); "
            "give another --out, or start again without going on from it"
        )


def environment(requests: Sequence[BenchRequest]) -> dict[str, str]:
    """What the results depend on, as name and text."""
    import torch

    names = dict.fromkeys(name for request in requests for name in request.backends)
    versions = {"torch": str(torch.__version__)}
    for name in names:
        found = backends.backend(name)
        if backends.missing(found) is None:
            try:
                versions[name] = found.version()
            except metadata.PackageNotFoundError:
                versions[name] = "of unknown version"
    flags = {name: os.environ[name] for name in _FLAGS if os.environ.get(name)}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        "cpu": str(cpu()).splitlines()[0],
        "date": date,
        "command": _command(),
        **{f"version of {name}": version for name, version in versions.items()},
        **{f"variable {name}": value for name, value in flags.items()},
    }


def _command() -> str:
    """As it can be typed again."""
    program = Path(sys.argv[0])
    if program.suffix == ".py":  # a script, or a module by its name
        return shlex.join(["python", *sys.orig_argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])
