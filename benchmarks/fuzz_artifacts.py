"""Corrupts an artifact thousands of times; loading must refuse it, quickly, and never crash.

    python -m benchmarks.fuzz_artifacts --count 10000
    python -m benchmarks.fuzz_artifacts --form exported --count 2000

``--form`` is the kind of file: "compiled", one graph; "exported", graphs for ranges of sizes;
"class", int8 layers, static parts and tensors for a class that is given; "guarded", a graph for
some calls and the float model for others.

Bit flips, truncations, splices, and structured hostile edits behind a right checksum
(``tests/corruption.py``). Each case is loaded in a process of bounded memory. Wanted is
ArtifactError; or, where an edit may describe another valid model, a model that is exactly what the
file says (saved again it has the same content; "compiled" alone), whose run ends in a result or a
Python exception.

A watching process notices cases that crash the loader, or take longer than ``--seconds``; the exit
status is 1 if there is any failure.
"""

from __future__ import annotations

import argparse
import collections
import os
import resource
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from tests.artifact_models import FORMS, mixed
from tests.corruption import content, corrupted, corrupted_anywhere
from x86quant.artifacts.reader import from_bytes
from x86quant.artifacts.writer import to_bytes
from x86quant.errors import ArtifactError, X86QuantWarning

_START_SECONDS = 120
_GOOD = ("refused", "loaded")


def outcome(
    data: bytes,
    expected: str,
    x: torch.Tensor | None,
    skeleton: nn.Module | None = None,
    faithful: bool = True,
) -> str:
    """``refused``, ``loaded``, or what went wrong. A loaded model also runs on ``x`` if given.

    With ``faithful``, what is loaded must be saved as the same content again.
    """
    try:
        model = from_bytes(data)[1].build(skeleton)
    except ArtifactError:
        return "refused"
    except (Exception, RecursionError) as error:
        return f"WRONG ERROR {type(error).__name__}: {error}".replace("\n", " ")[:200]
    if expected == "refuse":
        return "ACCEPTED"
    if faithful and content(to_bytes(model)) != content(data):
        return "UNFAITHFUL"
    if x is not None:
        _run(model, x)
    return "loaded"


def _run(model: nn.Module, x: torch.Tensor) -> None:
    """Run what a hostile file describes: any answer or exception will do, a crash will not."""
    try:
        model(x)
    except Exception as error:
        print(f"run: {type(error).__name__}", file=sys.stderr)


def _work(start: int, stop: int, memory: int, form: str) -> None:
    """Try the seeds in turn, a line each on stdout."""
    warnings.simplefilter("ignore", X86QuantWarning)
    compiled = form == "compiled"
    model, x, skeleton = (*mixed(), None) if compiled else FORMS[form]()
    data = to_bytes(model)
    from_bytes(data)[1].build(skeleton)(x)
    corrupt = corrupted if compiled else corrupted_anywhere
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for seed in range(start, stop):
        damaged, expected, name = corrupt(data, seed)
        found = outcome(damaged, expected, x, skeleton, faithful=compiled)
        print(f"{seed} {name} {found}", flush=True)


def _watch(start: int, stop: int, options: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """(seed, name, outcome) of every seed; a worker that dies or hangs is replaced."""
    while start < stop:
        command = [sys.executable, "-m", "benchmarks.fuzz_artifacts", "--worker"]
        command += [str(start), str(stop), "--megabytes", str(options.megabytes)]
        command += ["--form", options.form]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        ) as worker:
            assert worker.stdout is not None
            patience = _START_SECONDS
            while start < stop:
                ready, _, _ = select.select([worker.stdout], [], [], patience)
                line = worker.stdout.readline().decode() if ready else ""
                if not line:
                    worker.kill()
                    yield start, "?", "CRASHED" if ready else "HUNG"
                    start += 1
                    break
                patience = options.seconds
                if line != "ready\n":
                    seed, name, result = line.rstrip("\n").split(" ", 2)
                    yield int(seed), name, result
                    start = int(seed) + 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="number of corruptions")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=10, help="longest time for one case")
    parser.add_argument("--megabytes", type=int, default=1024, help="memory for one case")
    parser.add_argument("--form", choices=["compiled", *FORMS], default="compiled")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        start, stop = options.worker
        _work(start, stop, options.megabytes << 20, options.form)
        return 0
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failures = []
    began = time.monotonic()
    for seed, name, result in _watch(options.start, options.start + options.count, options):
        counts[name, result.split()[0]] += 1
        if result not in _GOOD:
            failures.append(f"seed {seed} ({name}): {result}")
        if seed % 100 == 99:
            done = seed + 1 - options.start
            print(f"\r{done} of {options.count}, {len(failures)} failures", end="", file=sys.stderr)
    print(file=sys.stderr)
    for name in sorted({name for name, _ in counts}):
        results = ", ".join(f"{r} {c}" for (n, r), c in sorted(counts.items()) if n == name)
        print(f"{name:<24} {results}")
    print(*failures, sep="\n", end="\n" if failures else "")
    print(
        f"{sum(counts.values())} corruptions in {time.monotonic() - began:.0f} s: "
        f"{sum(c for (_, r), c in counts.items() if r == 'refused')} refused, "
        f"{sum(c for (_, r), c in counts.items() if r == 'loaded')} loaded as what they say, "
        f"{len(failures)} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
