"""Runs tests on CPUs that are not here: emulated by qemu, or this one shown as another.

    python -m tests.emulated                                   # a few minutes on a few CPUs
    python -m tests.emulated --cpu EPYC-Milan tests/kernels/test_saturation.py
    python -m tests.emulated --all --cpu "Zen 3"               # every file: some 20 minutes
    python -m tests.emulated --all --cpu Haswell               # the same by qemu: hours

``X86QUANT_ISA`` caps what libraries let themselves be capped to; PyTorch, FBGEMM and oneDNN ask the
CPU itself in places that no variable reaches. There are two ways to answer there too.

- ``tools/masked_cpu.py`` changes what CPUID says, and all runs at full speed. It needs a CPU that
  has what the other one has, AVX-512 for instance; features that are not shown work if used.
- qemu, in its user mode, really lacks what the CPU lacks. It knows AVX2, but neither AVX-512 nor
  VNNI, and is some ten times slower. Float LSTMs, which torch runs by oneDNN, are computed wrongly
  under qemu 7.2, or end the process: ``--select "not lstm"`` leaves them out.

What the system says of the CPU in /proc is in both still said of the real one.

With ``--all`` each file runs by itself, for at most ``--minutes``; if files are named, only these.
Where a test ends the process, that test has failed, and the rest of its file goes on in a new one.

Programs that tests start see the same CPU: for qemu, ``sys.executable`` is a script that starts it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools import masked_cpu

ROOT = Path(__file__).parent.parent

#: What qemu is asked for. Features that it cannot emulate are taken away, so that it does not warn.
QEMU = {
    "Haswell": "Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-rtm,-invpcid",
    "EPYC-Milan": "EPYC-Milan",
    "Nehalem": "Nehalem",
}
CPUS = (*QEMU, *(name for name in masked_cpu.MASKS if name not in QEMU))
_LEGAL = "tests/kernels/test_saturation.py::test_fbgemm_is_legal_exactly_where_it_is_right"
_ERRATUM = "tests/kernels/test_errata.py::test_an_erratum_is_true_and_its_neighbour_is_not_hit"
_PLAIN = "tests/hardware/test_without_avx2.py"
_COMPUTES = "tests/tuning/test_tuning_measure.py::test_every_kernel_that_accepts_an_op_computes_it"

#: A few minutes' worth of what differs between CPUs most, for every CPU above.
SHORT = {
    "Nehalem": (  # the longest comes first
        f"{_PLAIN}::test_it_imports_and_says_what_is_missing",
        f"{_PLAIN}::test_quantize_runs_in_plain_torch[static]",
        f"{_PLAIN}::test_compile_save_and_load_run_in_plain_torch",
        f"{_PLAIN}::test_wrong_levels_are_still_errors",
        f"{_PLAIN}::test_loading_the_compiled_part_runs_nothing_newer",
    ),
    "Haswell": (
        _LEGAL,
        f"{_ERRATUM}[16]",
        "tests/kernels/test_overflow_campaign.py::test_no_legal_kernel_overflows[0]",
        "tests/explaining/test_int8_proof.py::test_reference_form_is_float",
        "tests/compiled/test_dynamo.py::test_weights_stay_the_same_codes",
    ),
    "EPYC-Milan": (
        f"{_LEGAL}[groupwise 4]",
        _COMPUTES,
        "tests/dynamic/test_linear_layers.py::test_stock_kernels_take_one_row_and_agree_within_a_step",
        "tests/stock/test_qconfig.py::test_stock_onednn_mapping_raises_on_conv_transpose[1]",
        "tests/artifacts/test_same_answers.py",
    ),
    **dict.fromkeys(
        ("Skylake server", "Alder Lake", "Zen 4"),
        (
            _LEGAL,
            _COMPUTES,
            "tests/kernels/test_overflow_campaign.py",
            "tests/artifacts/test_same_answers.py",
        ),
    ),
}

#: The exit code of a run that was stopped.
LATE = -1000

Counts = collections.Counter[str]

# The variables of the launcher and of its start-up module.
_LAUNCHER = "X86QUANT_TESTS_LAUNCHER"
_START_UP = f"""
import os, sys
sys.executable = os.environ.get("{_LAUNCHER}", sys.executable)
"""


def environment(cpu: str, folder: Path) -> dict[str, str]:
    """The environment of a run on this CPU; what it takes goes into ``folder``."""
    # OpenBLAS is to look at the CPU that is shown, whatever it was told of this one.
    own = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    quiet = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # what was written before a process ended is not lost
        _LAUNCHER: sys.executable,
    }
    if cpu not in QEMU:
        return {**own, **masked_cpu.environment(cpu, folder), **quiet}
    launcher = folder / "python"
    launcher.write_text(f'#!/bin/sh\nexec qemu-x86_64 "{sys.executable}" "$@"\n')
    launcher.chmod(0o755)
    (folder / "sitecustomize.py").write_text(_START_UP)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {
        **own,
        **quiet,
        "QEMU_CPU": QEMU[cpu],
        "PYTHONPATH": path,
        _LAUNCHER: str(launcher),
    }


def why_not(cpu: str) -> str | None:
    """Why no test can run on this CPU; None when it can."""
    if cpu not in QEMU:
        return masked_cpu.why_not(cpu)
    if shutil.which("qemu-x86_64") is None:
        return "qemu-x86_64 is not installed (Debian, Ubuntu: apt-get install qemu-user)"
    return None


def run(cpu: str, tests: Sequence[str], options: Sequence[str], minutes: float) -> tuple[int, str]:
    """pytest's exit code on this CPU, and its output; ``LATE`` when it took too long."""
    with tempfile.TemporaryDirectory() as folder:
        env = environment(cpu, Path(folder))
        pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *options)
        # By the shell: another thread that starts a process may hold the launcher open for writing.
        start = ("/bin/sh", env[_LAUNCHER]) if cpu in QEMU else (env[_LAUNCHER],)
        process = subprocess.Popen(
            [*start, *pytest, *tests],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # qemu's warnings of what it does not emulate
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=minutes * 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return LATE, f"{output}\nnot finished after {minutes:g} minutes"
    return process.returncode, output


def summary(output: str) -> str:
    """The counts in pytest's last line."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    return lines[-1].strip("= ") if lines else (output.strip().splitlines() or ["no output"])[-1]


def run_file(cpu: str, file: str, select: str, minutes: float) -> tuple[Counts, str]:
    """The outcomes of a file's tests, and the output of those that did not pass."""
    counts = Counts()
    seen: list[str] = []
    outputs: list[str] = []
    line = rf"^({re.escape(file)}::.+?)(?: ([A-Z]+)(?: \(.*\))? +\[ *\d+%\])?$"
    end = time.monotonic() + 60 * minutes
    while True:
        deselect = [f"--deselect={test}" for test in seen]
        left = (end - time.monotonic()) / 60
        code, output = run(cpu, [file], ("-v", "--tb=short", "-k", select, *deselect), left)
        started = re.findall(line, output, re.M)
        counts.update(outcome.lower() for _, outcome in started if outcome)
        if code not in (0, 5):  # 5: no test is selected
            outputs.append(output)
        if code == LATE:
            counts["file not finished"] += 1
        if code in range(6) or code == LATE or not started or started[-1][1]:
            if code not in (0, 1, 5, LATE):
                counts["file broken"] += 1
            return counts, "\n".join(outputs)
        counts["ended the process"] += 1
        seen += [test for test, _ in started]


def run_all(cpu: str, files: Sequence[str], select: str, minutes: float) -> bool:
    """Whether all tests of all files passed; prints the counts of each."""
    total = Counts()
    for file in files:
        start = time.monotonic()
        counts, output = run_file(cpu, file, select, minutes)
        total.update(counts)
        seconds = time.monotonic() - start
        print(f"{output}{cpu} {file}: {told(counts)} ({seconds:.0f} s)", flush=True)
    print(f"{cpu}: {len(files)} files, {told(total)}", flush=True)
    return not total.keys() - {"passed", "skipped", "xfail"}


def told(counts: Counts) -> str:
    """Counts in words."""
    return ", ".join(f"{number} {what}" for what, number in counts.items()) or "no tests"


def main() -> int:
    """Run the tests under every CPU named, several at a time, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tests", nargs="*", help="files or tests; the short set if none are named")
    parser.add_argument(
        "--cpu",
        action="append",
        choices=CPUS,
        help="may be repeated; those of the short set if none is named",
    )
    parser.add_argument("--all", action="store_true", help="each file by itself, with its counts")
    parser.add_argument("--select", default="", help="as pytest's -k")
    parser.add_argument(
        "--minutes", type=float, default=30, help="for a CPU, or a file; then it has failed"
    )
    parser.add_argument("--jobs", type=int, default=2, help="CPUs emulated at the same time")
    options = parser.parse_args()
    cpus = options.cpu or list(SHORT)
    for cpu in list(cpus):
        if reason := why_not(cpu):
            print(f"{cpu}: {reason}", flush=True)
            if options.cpu:
                return 3
            cpus.remove(cpu)

    def one(cpu: str) -> bool:
        if options.all:
            files = options.tests or sorted(
                str(p.relative_to(ROOT)) for p in ROOT.glob("tests/*/test_*.py")
            )
            return run_all(cpu, files, options.select, options.minutes)
        start = time.monotonic()
        tests = options.tests or SHORT[cpu]
        code, output = run(cpu, tests, ("-q", "-k", options.select), options.minutes)
        seconds = time.monotonic() - start
        if code != 0:
            print(output)
        print(f"{cpu}: {summary(output)} ({seconds:.0f} s in all)", flush=True)
        return code == 0

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        return 0 if all(list(pool.map(one, cpus))) else 1


if __name__ == "__main__":
    sys.exit(main())
