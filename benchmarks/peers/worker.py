"""Measures one network, every peer interleaved in this one process.

Started by ``benchmarks.against_peers``, with the environment set before torch loads:
``python -m benchmarks.peers.worker REQUEST RESULT STAGE``, all paths. A peer that raises is
recorded; one that takes the process down is named in STAGE, and the parent starts again without.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import mmap
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.peers import Bind, Run
from benchmarks.peers.results import NetworkResult, PeerResult, Settings
from x86quant.files import write_aside

if TYPE_CHECKING:
    import torch
    from torch import nn

CALIBRATION_IMAGES, HELD_OUT_IMAGES = 16, 16
WARM_ROUNDS = 2
CALLS = 2  # timed ones a turn, after one that is not
# Inductor is the one that may take too long: first, a restart without it loses least. It is also
# the one that minds what others have imported.
PREPARE_FIRST = "pt2e"
STAGE_BYTES = 64


class Stage:
    """A few bytes shared with the parent: what is being done, and with which peer."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), STAGE_BYTES)

    def set(self, what: str, peer: str) -> None:
        """Costs no system call, so that it can be said before every turn."""
        self._bytes[:] = f"{what} {peer}".encode().ljust(STAGE_BYTES)

    @staticmethod
    def read(path: Path) -> tuple[str, str]:
        """What, and which peer; both empty before the first."""
        what, _, peer = path.read_bytes().decode().strip(" \0").rpartition(" ")
        return what, peer


def measure(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    settle: Callable[[], None] = lambda: None,
    turn: Callable[[int, str], None] = lambda number, name: None,
) -> dict[str, tuple[float, ...]]:
    """Time every function, in turn, for many rounds that begin with another each.

    A turn is one untimed call, which finds its weights evicted by the others, and ``CALLS`` timed
    ones. The first ``WARM_ROUNDS`` rounds count for nothing.

    Args:
        runs: what to time, by name.
        rounds: how many count.
        settle: called before each turn, to wait for threads of the one before to go idle.
        turn: called before each turn, with the number of the round, the first warm one being
            1, and the name.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARM_ROUNDS, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turn(number + WARM_ROUNDS + 1, name)
            settle()
            taken = _turn(runs[name])
            if number >= 0:
                seconds[name] += taken
    return {name: tuple(taken) for name, taken in seconds.items()}


def _turn(run: Callable[[], object]) -> list[float]:
    run()
    taken = []
    for _ in range(CALLS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def wait_for_idle_threads(longest: float = 0.2, step: float = 0.002) -> None:
    """Sleep until this process uses no CPU: thread pools spin on for a while after their work.

    Next to each other they would take each other's cores; told not to spin at all
    (``OMP_WAIT_POLICY=passive``) they would be slower than what users get.
    """
    deadline = time.perf_counter() + longest
    while time.perf_counter() < deadline:
        before = time.process_time()
        time.sleep(step)
        if time.process_time() - before < step / 4:
            return


def sqnr(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    noise = (expected - actual).square().sum()
    return float(10 * (expected.square().sum() / noise).log10())


class Measurement:
    """One network while it is being measured."""

    def __init__(self, network: str, settings: Settings, stage: Stage) -> None:
        from benchmarks.networks import network_for_images

        self.network, self.settings, self.stage = network, settings, stage
        stage.set("building", network)
        self.model: nn.Module = network_for_images(network, settings.size)
        self.calibration = self._batches(CALIBRATION_IMAGES, seed=3)
        self.held_out = self._batches(HELD_OUT_IMAGES, seed=4)
        self.expected = [self.model(x) for x in self.held_out]
        self.results: dict[str, PeerResult] = {}
        self.versions: dict[str, str] = {}

    def run(self, excluded: Mapping[str, str]) -> NetworkResult:
        """Prepare every peer, check it, time those that are right.

        Args:
            excluded: peers that took an earlier attempt down, each with how.
        """
        runs: dict[str, Run] = {}
        names = self.settings.peers
        for name in sorted(names, key=lambda name: name != PREPARE_FIRST):
            if name in excluded:
                self.results[name] = PeerResult("failed", excluded[name])
            elif (run := self._prepare(name)) is not None:
                runs[name] = run
        self._measure(runs)
        return NetworkResult(
            self.network,
            self.settings,
            {name: self.results[name] for name in names},
            {**_environment(), **self.versions},
        )

    def _prepare(self, name: str) -> Run | None:
        peer = peers.load(name)
        if (reason := peers.missing(peer)) is not None:
            self._record(name, PeerResult("skipped", reason))
            return None
        self.versions[name] = peer.version()
        self.stage.set("preparing", name)
        start = time.perf_counter()
        try:
            with _quiet():
                bind = peer.prepare(
                    self.model, self.calibration, self.held_out[0], self.settings.threads
                )
                seconds = time.perf_counter() - start
                self.stage.set("checking", name)
                ratio = self._check(bind)
        # Whatever a peer trips over is its result on this network, and the others go on.
        except Exception as error:
            traceback.print_exc()
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._record(name, PeerResult("failed", text[:300]))
            return None
        self._record(
            name,
            PeerResult("ok", sqnr=ratio if peer.int8 else None, prepare_seconds=seconds),
        )
        return bind(self.held_out[0])

    def _check(self, bind: Bind) -> float:
        import torch

        actual = [bind(x)().clone() for x in self.held_out]
        for got, wanted in zip(actual, self.expected, strict=True):
            if got.shape != wanted.shape or not got.isfinite().all():
                raise ValueError(f"the output, of shape {tuple(got.shape)}, is wrong or not finite")
        return sqnr(torch.cat(self.expected), torch.cat(actual))

    def _measure(self, runs: Mapping[str, Run]) -> None:
        if not runs:
            return
        total = WARM_ROUNDS + self.settings.rounds
        times = measure(
            runs,
            self.settings.rounds,
            settle=wait_for_idle_threads if self.settings.threads > 1 else lambda: None,
            turn=lambda number, name: self.stage.set(f"measuring round {number} of {total}", name),
        )
        for name, seconds in times.items():
            before = self.results[name]
            self.results[name] = PeerResult("ok", "", seconds, before.sqnr, before.prepare_seconds)

    def _record(self, name: str, result: PeerResult) -> None:
        self.results[name] = result
        detail = result.reason
        if result.status == "ok":
            detail = f"in {result.prepare_seconds:.1f} s"
            if result.sqnr is not None:
                detail += f", SQNR {result.sqnr:.1f} dB"
        label = "prepared" if result.status == "ok" else result.status.upper()
        print(f"  {name}: {label} {detail}", file=sys.stderr, flush=True)

    def _batches(self, count: int, seed: int) -> Sequence[torch.Tensor]:
        """At least one batch, and all of one size: networks are compiled for it."""
        from benchmarks.networks import images

        batch = self.settings.batch
        return images(max(1, count // batch) * batch, self.settings.size, seed).split(batch)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what libraries say on stdout away from the report."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _environment() -> dict[str, str]:
    import x86quant

    date = datetime.datetime.now(datetime.timezone.utc)
    return {"cpu": str(x86quant.cpu()), "date": date.isoformat(timespec="seconds")}


def main(request: Path, result: Path, stage: Path) -> None:
    """Read the request, measure, write the result."""
    import torch

    wanted = json.loads(request.read_text())
    settings = Settings(**{**wanted["settings"], "peers": tuple(wanted["settings"]["peers"])})
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    # Progress alone is for stderr; what goes wrong comes as an exception.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with torch.no_grad():
        measurement = Measurement(wanted["network"], settings, Stage(stage))
        measured = measurement.run(wanted["excluded"])
    write_aside(result, measured.to_json())


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
    # Thread pools of seven libraries; none is owed an orderly end, and one may hang or crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
