"""Random programs of torch ops, quantized and compared with eager float.

    python -m benchmarks.fuzz_programs --seeds 0:1000 --record failures.jsonl

A program is an ``nn.Module`` of 3 to 20 statements drawn from torch's functions, methods, modules
and signatures: in-place ones, views, indexing, branches and loops, arithmetic on shapes among
them. It is kept as source, statement by statement, and each statement is one that eager torch
accepts. Every program goes through ``x86quant.quantize`` with settings of its own, or through
stock conversion and ``x86quant.compile`` (``--through``).

The answer is wrong if its structure, a shape or a dtype differs, if it is not finite where eager's
is, or if it is much further off than eager float with each op's result rounded to 8 bits: as noise
of that size, and to ranges seen on calibration data, both put in by a dispatch mode. It is compared
on data that calibration did not see, also at other sizes. An exception that x86quant did not raise
on purpose is a failure too, and so is taking minutes. What fails is shrunk: statements go while the
failure stays. ``--record`` gets a line of JSON for each failure, and ``judged.jsonl`` beside it
one for each chunk; ``--resume`` leaves out the seeds that stand there, and ``--total`` adds them
up: what was judged since that is noted, with ``--record benchmarks/fuzz/failures.jsonl``. The last
lines count, also what came back: programs of which nothing became int8 prove little.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.drawing import write
from benchmarks.fuzz.judging import THROUGH, Verdict, judged
from benchmarks.fuzz.ledger import Judged, Ledger
from benchmarks.fuzz.shrinking import kind_of, shrunk

#: A program that takes so many seconds of CPU fails.
_MOST_SECONDS = 120


class Tally:
    """Counts verdicts."""

    def __init__(self) -> None:
        self.kinds: collections.Counter[str] = collections.Counter()
        self.forms: collections.Counter[str] = collections.Counter()
        self.failures: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()

    def add(self, verdict: Verdict) -> None:
        """Count one more."""
        self.kinds[verdict.kind] += 1
        if verdict.kind == "passed":
            self.forms[verdict.form] += 1
            self.forms["sharp"] += verdict.sharp
            self.forms["int8"] += verdict.int8_calls > 0
        elif verdict.kind == "failed":
            self.failures[kind_of(verdict.reason)] += 1
        else:
            self.refusals[verdict.reason[:100]] += 1

    def __str__(self) -> str:
        passed = max(1, self.kinds["passed"])
        shares = {name: f"{self.forms[name] / passed:.0%}" for name in
                  ("whole", "parts", "float", "int8", "sharp")}  # fmt: skip
        return (
            f"{self.kinds['passed']} passed, {self.kinds['failed']} failed, "
            f"{self.kinds['refused']} refused; of those that passed {shares['whole']} came back as "
            f"one graph, {shares['parts']} in parts, {shares['float']} in float; int8 ran in the "
            f"calls of {shares['int8']}, and the answers of {shares['sharp']} were close"
        )


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {_MOST_SECONDS} seconds")

    signal.signal(signal.SIGPROF, late)
    # Again and again, since the code that runs may catch what is raised.
    signal.setitimer(signal.ITIMER_PROF, _MOST_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def verdict_of(seed: int, through: str) -> Verdict:
    """The verdict on the program of ``seed``."""
    try:
        with _in_time():
            return judged(write(seed), through)
    except TimeoutError as error:
        return Verdict("failed", f"seed {seed}: {error}")
    except Exception:  # of the judge itself: none of its programs may go unjudged
        return Verdict("failed", traceback.format_exc(limit=-4))


def _note(seed: int, through: str, verdict: Verdict, record: Path | None) -> None:
    """Print a failure, and add it to the record, as it is and shrunk."""
    print(f"--- program {seed}: {verdict.reason}", flush=True)
    program = write(seed)
    small = program if "seconds" in verdict.reason else shrunk(program, through, verdict.reason)
    print(small.source, flush=True)
    if record is not None:
        line = {"seed": seed, "through": through, "reason": verdict.reason, "source": small.source}
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _range(text: str) -> range:
    """``A:B`` as the numbers from A up to B, without it."""
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def _chunks(seeds: list[int], size: int) -> Iterator[list[int]]:
    """``seeds`` in order, at most ``size`` at once, each chunk without gaps."""
    chunk: list[int] = []
    for seed in seeds:
        if chunk and (len(chunk) == size or seed != chunk[-1] + 1):
            yield chunk
            chunk = []
        chunk.append(seed)
    if chunk:
        yield chunk


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=_range, default=range(100), metavar="A:B")
    parser.add_argument("--through", choices=THROUGH, default="quantize")
    parser.add_argument("--record", type=Path, help="where failures are added, as lines of JSON")
    parser.add_argument("--chunk", type=int, default=500, help="programs between two summaries")
    parser.add_argument("--no-shrink", action="store_true", help="leave failures as they are")
    parser.add_argument("--resume", action="store_true", help="leave out what was judged before")
    parser.add_argument("--total", action="store_true", help="only add up what was judged so far")
    arguments = parser.parse_args()
    if arguments.record is None and (arguments.resume or arguments.total):
        parser.error("--resume and --total need --record")
    ledger = None if arguments.record is None else Ledger(arguments.record.parent)
    if arguments.total:
        assert ledger is not None
        print(ledger.total())
        return 0
    seeds = list(arguments.seeds)
    if arguments.resume:
        assert ledger is not None
        seeds = ledger.left(seeds, arguments.through)
    torch.set_num_threads(1)
    start, cpu = time.monotonic(), time.process_time()
    tally, done = Tally(), 0
    for chunk in _chunks(seeds, arguments.chunk):
        before, chunk_cpu = tally.kinds.copy(), time.process_time()
        for seed in chunk:
            done += 1
            if done == 20:  # what torch imports and caches at its first use is there to stay
                gc.collect()
                gc.freeze()
                gc.set_threshold(100_000, 50, 100)  # traces are small objects: a tenth of the time
            verdict = verdict_of(seed, arguments.through)
            tally.add(verdict)
            if verdict.kind == "failed":
                if arguments.no_shrink:
                    print(f"--- program {seed}: {verdict.reason}", flush=True)
                else:
                    _note(seed, arguments.through, verdict, arguments.record)
        print(
            f"fuzz {arguments.through} up to {chunk[-1]}: {tally}; "
            f"{time.monotonic() - start:.0f} s, {(time.process_time() - cpu) / done:.3f} s of "
            "CPU each",
            flush=True,
        )
        if ledger is not None:
            now = tally.kinds - before
            counts = {kind: now[kind] for kind in ("passed", "failed", "refused")}
            seconds = round(time.process_time() - chunk_cpu, 1)
            ledger.add(
                Judged(
                    arguments.through, chunk[0], chunk[-1] + 1, **counts, seconds=seconds,
                    commit=ledger.commit, cpu=ledger.cpu,
                )
            )  # fmt: skip
    for text, counted in (("failed", tally.failures), ("refused", tally.refusals)):
        for reason, count in counted.most_common(20):
            print(f"{text} {count:5}: {reason}")
    if ledger is not None:
        print(ledger.total())
    return 1 if tally.kinds["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
