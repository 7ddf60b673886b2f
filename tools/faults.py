"""Lets everything that is written to a disk fail, at every place where it can.

    python -m tools.faults
    python -m tools.faults --scenario artifact

Each scenario writes files in a folder where earlier ones lie. It is run once for each call of the
system that changes a file there, and for each of four ways to fail: the process is killed, the disk
is full from now on, it has become read-only, or this one call fails. Wanted: what lay there can
still be read and is what it was, or else what was to be written; the process ends with an
``OSError`` or an error of this package, or does without the file; and the same once more, without
faults, succeeds.

A library that is preloaded counts the calls and fails them (``faults.c``); the runs are forks of
one process. Needs Linux and a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import x86quant
from x86quant.errors import X86QuantError

_SOURCE = Path(__file__).with_suffix(".c")
_KINDS = ("killed", "disk full", "read-only", "one call fails")
_SECONDS = 120
_REFUSED, _WRONG = 3, 4


@dataclasses.dataclass(frozen=True, slots=True)
class Scenario:
    """Something that writes files.

    Attributes:
        prepare: what lies in the folder before.
        act: what writes; may raise ``OSError`` or an error of this package.
        check: raises where something in the folder is neither old nor new; is given the folder and
            whether the writing was done to its end.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    check: Callable[[Path, bool], None]


def _model(seed: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(1, 8, 6, 6)
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1)).eval()
    return x86quant.quantize(net, [x, x], speed_check=False, progress=False), x


def _of_models(
    write: Callable[[nn.Module, Path], None],
    name: str,
    content: Callable[[Path], Any] = Path.read_bytes,
) -> Scenario:
    """Writes one model's file over another's; ``content`` tells them apart."""
    models = [_model(seed) for seed in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        whole = []
        for model, _ in models:
            write(model, Path(folder, name))
            whole.append(content(Path(folder, name)))

    def check(folder: Path, done: bool) -> None:
        found = content(folder / name)
        assert found in (whole[1:] if done else whole), "the file is neither old nor new"

    return Scenario(
        lambda folder: write(models[0][0], folder / name),
        lambda folder: write(models[1][0], folder / name),
        check,
    )


def _artifact() -> Scenario:
    return _of_models(x86quant.save, "net.x86q")


def _program() -> Scenario:
    x = torch.randn(1, 8, 6, 6)
    return _of_models(lambda model, path: x86quant.export_program(model, path, [(x,)]), "net.xq")


def _onnx() -> Scenario:
    import onnx

    from x86quant.onnx_models import writing_onnx

    export = torch.onnx.export
    known: dict[nn.Module, Any] = {}

    class Exported:
        def run_decompositions(self, _: Any) -> Exported:
            return self

    def write(model: nn.Module, path: Path) -> None:
        """Tracing takes seconds and writes nothing: it is done once for each model."""

        def made(*args: Any, **kwargs: Any) -> Any:
            if model not in known:
                known[model] = export(*args, **kwargs)
            return known[model]

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.onnx, "export", made))
            if model in known:
                program = mock.patch.object(writing_onnx, "_exported", return_value=Exported())
                stack.enter_context(program)
            x86quant.export_onnx(model, path)

    def numbers(path: Path) -> list[bytes]:  # the exporter gives values other names each time
        return sorted(one.raw_data for one in onnx.load(path).graph.initializer)

    return _of_models(write, "net.onnx", numbers)


def _packed_cache() -> Scenario:
    model, x = _model(0)
    with torch.no_grad():
        right = model(x)

    def act(folder: Path) -> None:
        found = x86quant.load(folder / "net.x86q", packed_cache=True)
        for _ in range(2):
            assert torch.equal(found(x), right), "another answer"

    def check(folder: Path, done: bool) -> None:
        act(folder)

    return Scenario(lambda folder: x86quant.save(model, folder / "net.x86q"), act, check)


def _rule_table() -> Scenario:
    from x86quant.tables.shipped import shipped_tables
    from x86quant.tables.table_reader import read_table
    from x86quant.tables.table_writer import write_table

    old, new = (read_table(path) for path in [*shipped_tables().values()][:2])

    def check(folder: Path, done: bool) -> None:
        names = {new.name} if done else {old.name, new.name}
        assert read_table(folder / "mine.toml").name in names

    return Scenario(
        lambda folder: write_table(old, folder / "mine.toml"),
        lambda folder: write_table(new, folder / "mine.toml"),
        check,
    )


def _journal() -> Scenario:
    from x86quant.tuning import measurement_files
    from x86quant.tuning.journal import Journal

    samples = Path(x86quant.__file__).parents[1] / "rules" / "measurements"
    measured = measurement_files.read(samples / "avx2.csv")
    some = measured.measurements[:9]

    def open_journal(folder: Path, *, resume: bool) -> Journal:
        return Journal(folder / "run.journal", measured.provenance, resume=resume)

    def prepare(folder: Path) -> None:
        with open_journal(folder, resume=False) as journal:
            journal.add(some[:3])

    def act(folder: Path) -> None:
        with open_journal(folder, resume=True) as journal:
            journal.add(some[3:6])
            journal.add(some[6:])

    def check(folder: Path, done: bool) -> None:
        with open_journal(folder, resume=True) as journal:
            found = len(journal.measurements)
        assert found >= 9 if done else found in (3, 6, 9, 12, 15), f"{found} are left"

    return Scenario(prepare, act, check)


def _measurements() -> Scenario:
    from x86quant.tuning import measurement_files

    samples = Path(x86quant.__file__).parents[1] / "rules" / "measurements"
    found = measurement_files.read(samples / "avx2.csv")
    # More than a buffer holds; all of them would take seconds to read after each fault.
    whole = dataclasses.replace(found, measurements=found.measurements[:600])
    few = dataclasses.replace(whole, measurements=whole.measurements[:5])

    def check(folder: Path, done: bool) -> None:
        found = len(measurement_files.read(folder / "all.csv").measurements)
        assert found == len(whole.measurements) or (not done and found == 5)

    return Scenario(
        lambda folder: measurement_files.write(folder / "all.csv", few),
        lambda folder: measurement_files.write(folder / "all.csv", whole),
        check,
    )


def _report() -> Scenario:
    from x86quant.reporting.written import gathered

    model, x = _model(0)
    report = gathered(model, x, progress=False)

    def write_old(folder: Path) -> None:
        (folder / "report.html").write_text("old")

    def check(folder: Path, done: bool) -> None:
        text = (folder / "report.html").read_text()
        assert text.rstrip().endswith("</html>") or (not done and text == "old")

    return Scenario(
        write_old,
        lambda folder: report.write(folder / "report.html"),
        check,
    )


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "artifact": _artifact,
    "program": _program,
    "onnx": _onnx,
    "packed-cache": _packed_cache,
    "rule-table": _rule_table,
    "journal": _journal,
    "measurements": _measurements,
    "report": _report,
}


def _forked(run: Callable[[], None]) -> int:
    """What a fork that calls ``run`` ends with: 0, ``_REFUSED``, ``_WRONG``; below 0 a signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(_SECONDS)
        try:
            run()
            status = 0
        except (OSError, X86QuantError):
            status = _REFUSED
        except BaseException:
            traceback.print_exc()
            status = _WRONG
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _attempt(scenario: Scenario, folder: Path, number: int, kind: int) -> tuple[int, str | None]:
    """How many calls there were in a run whose call ``number`` fails; what was wrong with it."""
    library: Any = ctypes.CDLL(None)
    counted = folder / "counted"
    place = folder / "files"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "prepared", place)

    def act() -> None:
        library.fault_begin(os.fsencode(place), ctypes.c_long(number), kind)
        try:
            scenario.act(place)
        finally:
            library.fault_end.restype = ctypes.c_long
            counted.write_text(str(library.fault_end()))

    counted.write_text("0")
    ended = _forked(act)
    if ended == _WRONG or ended not in (0, _REFUSED, -signal.SIGKILL):
        return 0, f"it ended with {ended}"
    if kind and ended == -signal.SIGKILL and _KINDS[kind - 1] != "killed":
        return 0, "it was killed"
    if _forked(lambda: scenario.check(place, ended == 0)):
        return 0, "what is there is wrong"

    def again() -> None:
        scenario.act(place)
        scenario.check(place, True)

    if _forked(again):
        return 0, "the same once more fails"
    return int(counted.read_text()), None


def tried(name: str) -> bool:
    """Whether the scenario ``name`` loses nothing, whatever fails; says how much was tried."""
    scenario = SCENARIOS[name]()
    found, runs = [], 0
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder, "prepared")  # once: some of it takes longer than what is tried
        prepared.mkdir()
        scenario.prepare(prepared)
        calls, wrong = _attempt(scenario, Path(folder), 1 << 30, 0)
        if wrong or not calls:
            raise SystemExit(f"{name}, without any fault: {wrong or 'nothing is written'}")
        for number in range(1, calls + 1):
            for kind, said in enumerate(_KINDS, 1):
                runs += 1
                _, wrong = _attempt(scenario, Path(folder), number, kind)
                if wrong:
                    found.append(f"call {number} of {calls}, {said}: {wrong}")
    print(f"{name:<14} {calls:3} calls, {runs:4} faults: {len(found)} findings", flush=True)
    for line in found:
        print(f"  {line}")
    return not found


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all scenarios; 1 if anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", choices=[*SCENARIOS], action="append", help="default: all")
    options = parser.parse_args(arguments)
    if not hasattr(ctypes.CDLL(None), "fault_begin"):
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "faults.so")
            compiler = os.environ.get("CC", "cc").split()
            flags = ["-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
            subprocess.run([*compiler, *flags], check=True)
            command = [sys.executable, "-W", "ignore", "-m", "tools.faults", *sys.argv[1:]]
            # Forks would wait for threads of torch that they do not have.
            environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
            return subprocess.run(command, env=environment, check=False).returncode
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = [tried(name) for name in options.scenario or SCENARIOS]  # all, whatever the first gave
    return 0 if all(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
