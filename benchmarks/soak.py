"""Runs int8 models for an hour while everything around them changes.

    python -m benchmarks.soak --minutes 60

Two processes, in each of which four threads run a convolutional network, an encoder, a decoder and
a recommender at changing sizes, in turn. Meanwhile the number of threads changes (up to four for
each core), calls that must fail are made in between, the process is forked and the fork runs a
model, Ctrl-C interrupts the main thread in mid-run, every other minute threads of another library
spin on all cores, and in every fifth minute the processes are stopped for three quarters of each
tenth of a second, as a quota of half a core does to two busy threads.

Wanted: the same bytes as at the beginning, memory in use that does not grow (the slopes over the
second half are printed), no thread that stands still, and calls that take no more than their share
of the cores beside the other library. Exits with 1 otherwise. Memory in use is what malloc has
given out: what it keeps for the next time grows for longer, with the number of threads that were
ever there, and is printed beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from x86quant.torchvision_import import import_torchvision

#: A thread that ends no call for so long stands still.
_STILL_SECONDS = 120
#: What memory in use may grow by in the second half: calls under way when it is read differ.
_MOST_GROWTH_MB = 2
#: A quota as control groups have it: of each period, so much, in seconds.
_PERIOD, _ON = 0.1, 0.025
_SPINNER = "import torch; x = torch.randn(900, 900)\nwhile True: x @ x"

Call = Callable[[], Any]


@dataclasses.dataclass
class Work:
    """A model with calls of several sizes, what each gives, and one that must fail."""

    name: str
    calls: Sequence[Call]
    fails: Call
    wanted: list[bytes] = dataclasses.field(default_factory=list)

    def answer(self, number: int) -> bytes:
        """What call ``number`` gives."""
        with torch.inference_mode():
            return b"".join(
                x.contiguous().numpy().tobytes() for x in _tensors(self.calls[number]())
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [x for one in value for x in _tensors(one)]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.point = nn.Sequential(nn.Conv2d(32, 64, 1), nn.Hardswish())
        self.dense = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.point(self.depthwise(self.first(x)))
        return self.head((y + self.dense(y)).mean((2, 3)))


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(6))
        self.top = nn.Sequential(nn.Linear(7 * 16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), *rows], 1))


def made() -> list[Work]:
    """The models."""
    import_torchvision()
    import transformers

    torch.manual_seed(0)
    quiet: dict[str, Any] = {"speed_check": False, "progress": False}
    pictures = [torch.randn(n, 3, s, s) for n, s in ((1, 64), (2, 96), (4, 64), (1, 112))]
    net = x86quant.quantize(_Net().eval(), pictures, **quiet)
    small = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**small, intermediate_size=128)
    ids = [torch.randint(1, 200, (n, t)) for n, t in ((1, 7), (2, 33), (4, 16), (1, 120))]
    bert = x86quant.quantize(
        transformers.BertModel(config).eval(), [{"input_ids": x} for x in ids], **quiet
    )
    config = transformers.LlamaConfig(**small, intermediate_size=128, num_key_value_heads=2)
    config.eos_token_id = None
    llama = transformers.LlamaForCausalLM(config).eval()
    llama = x86quant.quantize(llama, [{"input_ids": x} for x in ids], **quiet)
    dense = [(torch.randn(n, 8), torch.randint(0, 1000, (n, 6, 3))) for n in (1, 7, 64, 256)]
    recommender = x86quant.quantize(_Recommender().eval(), dense, **quiet)

    def generated(x: torch.Tensor) -> Any:
        return llama.generate(input_ids=x, max_new_tokens=6, do_sample=False)

    return [
        Work("cnn", [lambda x=x: net(x) for x in pictures], lambda: net(torch.zeros(1, 5, 9, 9))),
        Work("encoder", [lambda x=x: bert(input_ids=x) for x in ids],
             lambda: bert(input_ids=torch.full((1, 3), 10**6))),
        Work("decoder", [lambda x=x: generated(x) for x in ids],
             lambda: llama(input_ids=torch.zeros(2, 3, 4, dtype=torch.long))),
        Work("recommender", [lambda x=x: recommender(*x) for x in dense],
             lambda: recommender(torch.zeros(2, 9), torch.zeros(2, 6, 3, dtype=torch.long))),
    ]  # fmt: skip


class _Process:
    """One of the processes: its threads, what went wrong, and how its calls went."""

    def __init__(self, number: int, seconds: float, pipe: Any) -> None:
        self.rng = random.Random(number)
        self.ends = time.monotonic() + seconds
        self.pipe = pipe
        self.wrong: list[str] = []
        self.works = made()
        for work in self.works:
            for _ in range(3):  # graphs for sizes not seen before are made in the first calls
                work.wanted = [work.answer(i) for i in range(len(work.calls))]
        self.latest = {work.name: time.monotonic() for work in self.works}
        self.calls = dict.fromkeys(self.latest, 0)
        self.failed_calls = self.forks = self.interruptions = 0
        self.times: list[tuple[float, float]] = []
        self.in_use: list[tuple[float, float]] = []

    def differs(self, work: Work, number: int) -> bool:
        """Whether a call gives something else than it did, which is written down."""
        found = work.answer(number)
        if found != work.wanted[number]:
            self.wrong.append(f"{work.name}, call {number}: another answer")
        return found != work.wanted[number]

    def thread(self, first: int) -> None:
        """Runs models in turn until the end."""
        rng = random.Random(first)
        turn = first
        try:
            while time.monotonic() < self.ends and not self.wrong:
                work = self.works[turn % len(self.works)]
                turn += 1
                number = rng.randrange(len(work.calls))
                began = time.monotonic()
                self.differs(work, number)
                now = time.monotonic()
                if work.name == "cnn" and number == 0:
                    self.times.append((now, now - began))
                self.latest[work.name] = now
                self.calls[work.name] += 1
                if rng.random() < 0.02:
                    self.fail(work)
        except BaseException:
            self.wrong.append(traceback.format_exc())

    def fail(self, work: Work) -> None:
        """A call that must fail does, by an exception."""
        try:
            with torch.inference_mode():
                work.fails()
        except Exception:
            self.failed_calls += 1
        else:
            self.wrong.append(f"{work.name}: a call that cannot be answered was")

    def fork(self) -> None:
        """A fork runs the network, which needs no thread that is not there."""
        child = os.fork()
        if child == 0:
            signal.alarm(_STILL_SECONDS)
            torch.set_num_threads(1)
            os._exit(int(self.works[0].answer(0) != self.works[0].wanted[0]))
        self.forks += 1
        if status := os.waitpid(child, 0)[1]:
            self.wrong.append(f"a fork ended with {status}")

    def interrupt(self) -> None:
        """Ctrl-C while the main thread runs models; the next call is right."""
        work = self.rng.choice(self.works)
        ends = time.monotonic() + _STILL_SECONDS
        try:
            after = self.rng.random() * 0.05
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
            while time.monotonic() < ends:
                work.answer(0)
            self.wrong.append("Ctrl-C did not come")
        except KeyboardInterrupt:
            self.interruptions += 1
        self.differs(work, 0)

    def run(self) -> None:
        """Everything, until the time is over or something is wrong."""
        threads = [threading.Thread(target=self.thread, args=(n,), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        cores = len(os.sched_getaffinity(0))
        while time.monotonic() < self.ends and not self.wrong:
            torch.set_num_threads(self.rng.randint(1, 4 * cores))
            self.rng.choice((self.fork, self.interrupt, lambda: time.sleep(0.2)))()
            self.in_use.append((time.monotonic(), _given_out_mb()))
            still = [n for n, at in self.latest.items() if time.monotonic() - at > _STILL_SECONDS]
            if still:
                self.wrong.append(f"stands still: {', '.join(still)}")
            time.sleep(0.3)
        for thread in threads:
            thread.join(_STILL_SECONDS)
            if thread.is_alive():
                self.wrong.append("a thread did not end")
        self.pipe.send({
            "wrong": self.wrong[:5], "calls": self.calls, "failed": self.failed_calls,
            "forks": self.forks, "interruptions": self.interruptions, "times": self.times,
            "in_use": self.in_use,
        })  # fmt: skip


def _process(number: int, seconds: float, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    # What a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        one = _Process(number, seconds, pipe)
        pipe.send("ready")
        one.run()
    except BaseException:
        pipe.send({"wrong": [traceback.format_exc()]})
    os._exit(0)  # threads that stand still would be waited for


def _given_out_mb() -> float:
    """What malloc has given out, of all of its arenas."""
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as told:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(told.fileno()), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        told.seek(0)
        text = told.read().decode()
    total = text[text.rindex("</heap>") :]

    def size(of: str) -> int:
        found = re.search(rf'{of}"[^>]* size="(\d+)"', total)
        assert found is not None, total
        return int(found[1])

    return (size("current") - size("rest") - size("fast") + size("mmap")) / 1e6


def _memory_mb(pid: int) -> float:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return (
            sum(int(line.split()[1]) for line in file if line.startswith(("Pss:", "Swap:"))) / 1e3
        )


def _wait(seconds: float, throttled: Sequence[int]) -> None:
    """Let time go by, in which these processes have half a core."""
    ends = time.monotonic() + seconds
    while throttled and time.monotonic() < ends:
        for stop, lasts in ((signal.SIGCONT, _ON), (signal.SIGSTOP, _PERIOD - _ON)):
            for pid in throttled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, stop)
            time.sleep(lasts)
    for pid in throttled:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    time.sleep(max(0.0, ends - time.monotonic()))


def _slope(samples: Sequence[tuple[float, float]]) -> float:
    """MB an hour over the second half."""
    later = np.array(samples[len(samples) // 2 :])
    return float(np.polyfit(later[:, 0] - later[0, 0], later[:, 1], 1)[0] * 3600)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print_environment()
    context = multiprocessing.get_context("spawn")
    running = []
    for number in range(options.processes):
        here, there = context.Pipe()
        process = context.Process(target=_process, args=(number, options.minutes * 60, there))
        process.start()
        running.append((process, here))
    if any(pipe.recv() != "ready" for _, pipe in running):
        raise SystemExit("a process did not begin")
    memory: list[list[tuple[float, float]]] = [[] for _ in running]
    beside: list[tuple[float, float]] = []
    found: list[Any] = [None] * len(running)
    began = time.monotonic()
    spinner: subprocess.Popen[bytes] | None = None
    while not all(found):
        now = time.monotonic()
        wants = int((now - began) // 60) % 2 == 1
        if wants and spinner is None:
            spinner = subprocess.Popen([sys.executable, "-c", _SPINNER])
            beside.append((now, float("inf")))
        elif not wants and spinner is not None:
            spinner.kill()
            spinner.wait()
            spinner = None
            beside[-1] = (beside[-1][0], now)
        for number, (process, pipe) in enumerate(running):
            if found[number] is None and pipe.poll():
                found[number] = pipe.recv()
            elif found[number] is None and process.is_alive():
                memory[number].append((now - began, _memory_mb(process.pid)))
            elif found[number] is None:
                found[number] = {"wrong": [f"the process ended with {process.exitcode}"]}
        if sys.stderr.isatty():
            print(f"\r{(now - began) / 60:.0f} minutes", end="", file=sys.stderr)
        pids = [x.pid for n, (x, _) in enumerate(running) if found[n] is None and x.pid is not None]
        _wait(2, pids if int((now - began) // 60) % 5 == 4 else [])
    if spinner is not None:
        spinner.kill()
    return _told(found, memory, beside)


def _told(found: Sequence[Any], memory: Any, beside: Sequence[tuple[float, float]]) -> int:
    failed = False
    for number, one in enumerate(found):
        for what in one["wrong"]:
            print(f"process {number}: {what}")
            failed = True
        if "calls" not in one:
            continue
        calls = ", ".join(f"{count} {name}" for name, count in one["calls"].items())
        print(
            f"process {number}: {calls}; {one['failed']} failed as they must, "
            f"{one['forks']} forks, {one['interruptions']} times Ctrl-C"
        )
        if len(memory[number]) > 20:
            slope = _slope(one["in_use"])
            print(
                f"  memory in use {one['in_use'][-1][1]:.0f} MB, {slope:+.1f} MB an hour; "
                f"of the process {memory[number][-1][1]:.0f} MB, {_slope(memory[number]):+.1f}"
            )
            lasted = one["in_use"][-1][0] - one["in_use"][len(one["in_use"]) // 2][0]
            failed |= slope * lasted / 3600 > _MOST_GROWTH_MB
        shared = [t for at, t in one["times"] if any(a < at < b for a, b in beside)]
        alone = [t for at, t in one["times"] if not any(a < at < b for a, b in beside)]
        if shared and alone:
            ratio = statistics.median(shared) / statistics.median(alone)
            print(f"  a call beside spinning threads takes {ratio:.2f} times as long (median)")
    print("failed" if failed else "equal bytes, no thread stood still")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
