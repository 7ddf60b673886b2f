"""Gives everything that reads what others wrote thousands of changed inputs.

    python -m benchmarks.fuzz_readers --count 5000
    python -m benchmarks.fuzz_readers --reader onnx --count 100000 --start 5000
    python -m benchmarks.fuzz_readers --reader rule-table --guided --count 20000

An input is refused by an error of this package, or read; anything else is a finding: another
exception, an answer that cannot be right, a process that ends, takes longer than ``--seconds`` or
more memory than ``--megabytes``. How many inputs got past the first check (is this such a file at
all?) is counted, and too small a share of them is a failure as well: such a fuzz would test that
check alone.

Inputs are samples with random changes, made to keep most of the structure (``benchmarks/readers``);
seed N is the same input each time. With ``--guided`` libFuzzer chooses what to change on by the
lines of this package that were run (``pip install atheris``).

The loader of program files is in C++, and has a fuzz of its own: ``tools/sanitize_serving.py``.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.readers import READERS, reader
from benchmarks.readers.reader import Depth, Reader

_START_SECONDS = 600  # on a machine that does much else
_FOUND = "FOUND"


def changed(of: Reader, seed: int) -> bytes:
    """Input number ``seed``."""
    rng = random.Random(seed)
    return of.change(rng, rng.choice(list(of.samples)))


def outcome(of: Reader, data: bytes) -> str:
    """The name of a depth, or what was found."""
    try:
        return of.read(data).name
    except (Exception, RecursionError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return f"{_FOUND} {' '.join(told.split())[:300]}"


def checked(name: str, folder: Path) -> Reader:
    """The reader of this ``name``, which reads its own samples."""
    found = reader(name, folder)
    for number, sample in enumerate(found.samples):
        if (said := outcome(found, sample)) != Depth.READ.name:
            raise SystemExit(f"{name}: sample {number} as it is: {said}")
    return found


def _bound(megabytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = used + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _work(name: str, first: int, last: int, megabytes: int) -> None:
    """Try the seeds in turn, a line each on the real stdout."""
    out = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
        found = checked(name, Path(folder))
        _bound(megabytes)
        print(f"ready {found.least}", file=out, flush=True)
        for seed in range(first, last):
            print(f"{seed} {outcome(found, changed(found, seed))}", file=out, flush=True)


def _fast_folder() -> str | None:
    """Where files need no disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _watch(name: str, options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """(seed, outcome) of every seed; a worker that dies or hangs is replaced.

    Before those of a worker, (-1, the share that must get past the first check).
    """
    at, last = options.start, options.start + options.count
    while at < last:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.fuzz_readers",
            "--reader",
            name,
        ]
        command += ["--worker", str(at), str(last), "--megabytes", str(options.megabytes)]
        errors = None if options.verbose else subprocess.DEVNULL
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, bufsize=0) as worker:
            assert worker.stdout is not None
            patience = _START_SECONDS
            while at < last:
                ready, _, _ = select.select([worker.stdout], [], [], patience)
                line = worker.stdout.readline().decode() if ready else ""
                if not line:
                    worker.kill()
                    worker.wait()
                    if patience == _START_SECONDS:
                        raise SystemExit(f"{name}: its samples are not read: see --verbose")
                    why = f"ended with {worker.returncode}" if ready else "took too long"
                    yield at, f"{_FOUND} {why}"
                    at += 1
                    break
                patience = options.seconds
                seed, _, result = line.rstrip("\n").partition(" ")
                if seed == "ready":
                    yield -1, result
                else:
                    yield int(seed), result
                    at = int(seed) + 1


def fuzzed(name: str, options: argparse.Namespace) -> bool:
    """Whether nothing was found; a line says how far the inputs got."""
    counts: collections.Counter[str] = collections.Counter()
    failures: dict[str, list[int]] = {}
    began = time.monotonic()
    least = 0.0
    for seed, result in _watch(name, options):
        if seed < 0:
            least = float(result)
            continue
        kind = result.partition(" ")[0]
        counts[kind] += 1
        if kind == _FOUND:
            failures.setdefault(result.removeprefix(_FOUND), []).append(seed)
        if sys.stderr.isatty() and seed % 100 == 99:
            print(f"\r{name}: {seed + 1 - options.start}   ", end="\r", file=sys.stderr)
    return _told(name, counts, failures, time.monotonic() - began, least)


def _told(
    name: str, counts: dict[str, int], failures: dict[str, list[int]], seconds: float, least: float
) -> bool:
    total = sum(counts.values())
    first, read = counts.get(Depth.FIRST.name, 0), counts.get(Depth.READ.name, 0)
    print(
        f"{name:<18} {total:>7} inputs in {seconds:5.0f} s: {(total - first) / total:4.0%} past "
        f"the first check, {read / total:4.0%} read, {counts.get(_FOUND, 0)} findings", flush=True
    )  # fmt: skip
    for said, seeds in failures.items():
        print(f"  {len(seeds)} times, seed {seeds[0]}:{said}")
    if total - first < least * total:
        print(f"  too few got past the first check: {least:.0%} should")
        return False
    return not failures


def _guided(name: str, options: argparse.Namespace) -> None:
    """The same with libFuzzer; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["x86quant"]):
        folder = tempfile.mkdtemp(dir=_fast_folder())
        found = checked(name, Path(folder))
    _bound(options.megabytes)
    counts: collections.Counter[str] = collections.Counter()
    corpus = Path(folder, "corpus")
    corpus.mkdir()
    for number, sample in enumerate(found.samples):
        (corpus / str(number)).write_bytes(sample)
    began = time.monotonic()

    def one(data: bytes) -> None:
        if not data:  # libFuzzer begins with that, whatever the corpus
            return
        counts[found.read(data).name] += 1
        if sum(counts.values()) >= options.count:
            # It goes on from what was refused, too, so that fewer get further.
            took = time.monotonic() - began
            os._exit(0 if _told(name, counts, {}, took, found.least / 4) else 1)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:  # what is changed again and again is refused at once
            data = rng.choice(list(found.samples))
        try:
            return found.change(rng, data)[:most]
        except Exception:  # an input of libFuzzer's own may be no text, or no JSON
            return found.change(rng, rng.choice(list(found.samples)))[:most]

    flags = ["-max_len=1000000", f"-timeout={max(1, int(options.seconds))}", "-rss_limit_mb=8000"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reader", choices=[*READERS], action="append", help="default: all")
    parser.add_argument("--count", type=int, default=5000, help="inputs for each reader")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=60, help="longest time for one input")
    parser.add_argument("--megabytes", type=int, default=1024, help="memory for one input")
    parser.add_argument("--guided", action="store_true", help="by libFuzzer (atheris)")
    parser.add_argument("--verbose", action="store_true", help="show what the processes say")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.reader or [*READERS]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.worker:
        first, last = options.worker
        _work(names[0], first, last, options.megabytes)
        return 0
    if options.guided:
        _guided(names[0], options)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda name: fuzzed(name, options), names))
    return 0 if all(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
