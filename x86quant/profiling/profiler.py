"""``profile(model, inputs)``: the time of every step, beside what this CPU could do."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from x86quant import extension
from x86quant.errors import InvalidInputError
from x86quant.files import write_aside
from x86quant.profiling.recorder import Recorder, TimedRun
from x86quant.profiling.roofline import Roofline, measure_roofline, using_threads
from x86quant.profiling.run_step import OUTSIDE, RunStep
from x86quant.profiling.trace import chrome_trace
from x86quant.runtime.programs import NativeStep
from x86quant.terminal.text_table import text_table

_WARMUP = 3
_TOTALS = (
    "wall_us",
    "least_wall_us",
    "run_us",
    "steps_us",
    "between_us",
    "between_share",
    "outside_us",
    "bound_us",
    "timer_us",
    "peak_bytes",
    "naive_bytes",
    "runs",
    "threads",
)
_TIMER_STEPS, _TIMER_ROUNDS = 1000, 15


@dataclasses.dataclass(frozen=True)
class ProfiledStep:
    """A step and its time.

    Attributes:
        step: what it is.
        microseconds: median over the runs, less what the timer itself takes.
        bound_us: what the roofline allows at best.
    """

    step: RunStep
    microseconds: float
    bound_us: float

    @property
    def gops(self) -> float | None:
        """10⁹ operations a second, two a multiply-add; None if it multiplies nothing."""
        if not self.step.multiply_adds or not self.microseconds:
            return None
        return 2 * self.step.multiply_adds / self.microseconds / 1e3

    @property
    def moved_bytes(self) -> int:
        """Bytes of its inputs, weights and output."""
        return self.step.activation_bytes + self.step.weight_bytes

    @property
    def gb_per_s(self) -> float | None:
        """10⁹ bytes moved a second."""
        return self.moved_bytes / self.microseconds / 1e3 if self.microseconds else None

    @property
    def roofline_share(self) -> float | None:
        """The bound over the time: 1 is as fast as this CPU can."""
        return self.bound_us / self.microseconds if self.microseconds else None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        step = self.step
        return {
            "name": step.name,
            "layer": step.layer,
            "op": step.op,
            "kind": step.kind,
            "shape": step.shape,
            "parts": step.parts,
            "kernel": step.kernel,
            "rule": step.rule,
            "reason": step.reason,
            "fused": list(step.fused),
            "microseconds": self.microseconds,
            "multiply_adds": step.multiply_adds,
            "activation_bytes": step.activation_bytes,
            "weight_bytes": step.weight_bytes,
            "gops": self.gops,
            "gb_per_s": self.gb_per_s,
            "bound_us": self.bound_us,
            "roofline_share": self.roofline_share,
        }


@dataclasses.dataclass(frozen=True)
class Group:
    """Steps that have something in common, together."""

    name: str
    steps: int
    microseconds: float
    share: float
    gops: float | None
    roofline_share: float | None


@dataclasses.dataclass(frozen=True)
class ProfileSummary:
    """Groups of steps, those that take longest first: data, and a table when printed."""

    by: str
    groups: tuple[Group, ...]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One plain dictionary a group."""
        return [dataclasses.asdict(group) for group in self.groups]

    def __str__(self) -> str:
        header = (self.by, "steps", "µs", "time", "GOPS", "roofline")
        rows = [
            (
                group.name,
                str(group.steps),
                f"{group.microseconds:.1f}",
                f"{group.share:.1%}",
                _number(group.gops),
                _percent(group.roofline_share),
            )
            for group in self.groups
        ]
        return text_table(header, rows, right=header[1:])


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of every step of a model: data, and a table when printed.

    Attributes:
        steps: in the order they run.
        wall_us: the time of a whole run without timers, median over the runs.
        least_wall_us: the same of the fastest run.
        between_us: the time of a timed run between the steps of its compiled graphs, less timers,
            median over the runs.
        outside_us: the time of a timed run outside of compiled graphs and int8 layers: torch and
            Python around them. 0 of a model that is one compiled graph itself.
        timer_us: what one timer takes; taken off every native step.
        peak_bytes: of the arenas in use at once, the sum over segments.
        naive_bytes: what the same tensors would take side by side.
        runs, threads: how it was measured.
        roofline: what this CPU can do.
    """

    steps: tuple[ProfiledStep, ...]
    wall_us: float
    least_wall_us: float
    between_us: float
    outside_us: float
    timer_us: float
    peak_bytes: int
    naive_bytes: int
    runs: int
    threads: int
    roofline: Roofline

    def __iter__(self) -> Iterator[ProfiledStep]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def steps_us(self) -> float:
        """The sum of the steps' medians."""
        return sum(step.microseconds for step in self.steps)

    @property
    def run_us(self) -> float:
        """A run by its parts: the steps, the time between them, and outside of all graphs."""
        return self.steps_us + self.between_us + self.outside_us

    @property
    def between_share(self) -> float:
        """Time between kernels, as a share of the run."""
        return self.between_us / self.run_us

    @property
    def bound_us(self) -> float:
        """What the roofline allows all steps together."""
        return sum(step.bound_us for step in self.steps)

    def by_kernel(self) -> ProfileSummary:
        """Together for each kernel."""
        return self._grouped("kernel", lambda step: step.kernel)

    def by_kind(self) -> ProfileSummary:
        """Together for each kind of step, such as "conv 3×3"."""
        return self._grouped("kind", lambda step: step.kind)

    def _grouped(self, by: str, key: Callable[[RunStep], str]) -> ProfileSummary:
        groups: dict[str, list[ProfiledStep]] = {}
        for step in self.steps:
            groups.setdefault(key(step.step), []).append(step)
        total = self.steps_us + self.outside_us
        made = [_group(name, steps, total) for name, steps in groups.items()]
        if self.outside_us:
            share = self.outside_us / total
            made.append(Group(OUTSIDE, 0, self.outside_us, share, None, None))
        return ProfileSummary(by, tuple(sorted(made, key=lambda group: -group.microseconds)))

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **{name: getattr(self, name) for name in _TOTALS},
            "roofline": dataclasses.asdict(self.roofline),
            "by_kernel": self.by_kernel().to_dicts(),
            "by_kind": self.by_kind().to_dicts(),
            "steps": [step.to_dict() for step in self.steps],
        }

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto or chrome://tracing; never half a file."""
        write_aside(Path(path), chrome_trace(self))

    def totals(self) -> str:
        """The lines below the table."""
        outside = f", {OUTSIDE} {self.outside_us:.1f}" if self.outside_us else ""
        if outside:
            outside += f" ({self.outside_us / self.run_us:.1%})"
        saved = self.naive_bytes / max(self.peak_bytes, 1)
        return "\n".join(
            [
                f"run      {self.run_us:.1f} µs: steps {self.steps_us:.1f}, between kernels "
                f"{self.between_us:.1f} ({self.between_share:.1%})" + outside,
                f"plain    {self.wall_us:.1f} µs without timers, median of {self.runs}; "
                f"{self.least_wall_us:.1f} at best",
                f"timer    {self.timer_us * 1e3:.0f} ns a step, taken off",
                f"roofline {self.roofline}",
                f"allows   {self.bound_us:.1f} µs: {self.bound_us / self.run_us:.0%} of the run",
                f"arena    {self.peak_bytes / 1024:.0f} KiB; {self.naive_bytes / 1024:.0f} KiB "
                f"side by side ({saved:.1f} times)",
            ]
        )

    def __str__(self) -> str:
        header = ("layer", "kind", "output", "kernel", "rule", "µs", "time", "GOPS", "GB/s", "roof")
        total = self.steps_us + self.outside_us
        rows = [
            (
                step.step.layer,
                step.step.kind,
                "×".join(map(str, step.step.output)),
                step.step.kernel,
                step.step.rule or "–",
                f"{step.microseconds:.1f}",
                _percent(step.microseconds / total if total else None),
                _number(step.gops),
                _number(step.gb_per_s),
                _percent(step.roofline_share),
            )
            for step in self.steps
        ]
        if self.outside_us:
            taken = (f"{self.outside_us:.1f}", _percent(self.outside_us / total))
            rows.append((OUTSIDE, "", "", "torch", "–", *taken, "", "", ""))
        table = text_table(header, rows, right=header[5:])
        return f"{table}\n\n{self.by_kind()}\n\n{self.totals()}"


def profile(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    runs: int = 30,
    threads: int | None = None,
) -> Profile:
    """Time every step of ``model`` on ``inputs``.

    Runs with and without timers take turns. A native step is timed in C++, by a clock whose own
    time is measured and taken off; a torch op is timed around its call, and so is an int8 layer
    that runs by itself. What neither they nor the compiled graphs take is told as time outside.

    Args:
        model: what ``x86quant.quantize``, ``load`` or ``compile`` returned, or a module around it.
            Several compiled parts are listed in the order in which they run.
        inputs: the tuple of positional inputs.
        kwargs: keyword arguments, which a model loaded from a file may take.
        runs: how many of each kind.
        threads: torch's threads while it runs; by default as set.

    Raises:
        InvalidInputError: nothing in it is compiled or int8, or no graph of it holds for these
            inputs; wrong or empty inputs, or no runs.
        ExtensionError: the compiled part is missing: there are no kernels to time.
    """
    _check(model, inputs, runs, threads)
    extension.load()
    used = torch.get_num_threads() if threads is None else threads
    roofline = measure_roofline(used)
    timer_us = measure_timer()
    with using_threads(used), torch.no_grad():
        recorder = Recorder(model, inputs, kwargs)
        walls, timed = _measure(lambda: model(*inputs, **(kwargs or {})), recorder, runs)
    steps = recorder.steps
    peak = sum(plan.run_bytes(used) for plan in recorder.plans)
    weights = {(step.layer, step.segment, step.name): step.weight_bytes for step in steps}
    model_bytes = peak + sum(weights.values())
    return Profile(
        steps=tuple(
            ProfiledStep(
                step,
                max(0.0, statistics.median(taken) - timer_us * _timers(step, used)),
                roofline.bound_us(step, model_bytes),
            )
            for step, taken in zip(
                steps, zip(*(run.steps for run in timed), strict=True), strict=True
            )
        ),
        wall_us=statistics.median(walls),
        least_wall_us=min(walls),
        between_us=statistics.median(
            run.microseconds - run.outside - sum(run.steps) for run in timed
        ),
        outside_us=statistics.median(run.outside for run in timed),
        timer_us=timer_us,
        peak_bytes=peak,
        naive_bytes=sum(plan.naive_bytes for plan in recorder.plans),
        runs=runs,
        threads=used,
        roofline=roofline,
    )


def _timers(step: RunStep, threads: int) -> float:
    """How many timers are in the time of a step; parts that run side by side share the time."""
    return step.parts / min(threads, step.parts) if step.segment else 0.0


@functools.cache
def measure_timer() -> float:
    """Microseconds that timing one native step takes: what each step's time has too much."""
    steps = _idle_program(_TIMER_STEPS)
    none = _idle_program(0)
    x = [torch.zeros(1, dtype=torch.uint8)]
    timed, untimed, call = [], [], []
    for _ in range(_TIMER_ROUNDS):
        timed.append(float(steps.run_timed(x)[1].sum()))
        untimed.append(_wall(lambda: steps.run(x)))
        call.append(_wall(lambda: none.run(x)))
    extra: float = min(timed) - (min(untimed) - min(call))
    return max(0.0, extra) / _TIMER_STEPS


def _idle_program(steps: int) -> Any:
    """A program that copies one byte ``steps`` times, and returns nothing."""
    program = extension.native().Program(1, 1)
    program.expect([1], [1], "uint8")
    for _ in range(steps):
        NativeStep("strided_copy", {
            "element_size": 1, "sizes": [1], "from": [1, 0], "from_strides": [1],
            "to": [0, 0], "to_strides": [1],
        }).add_to(program)  # fmt: skip
    program.check_reach()
    return program


def _measure(
    call: Callable[[], object], recorder: Recorder, runs: int
) -> tuple[list[float], list[TimedRun]]:
    """Microseconds of runs without timers, and runs with them."""
    walls, timed = [], []
    for turn in range(-_WARMUP, runs):
        wall = _wall(call)
        run = recorder.run()
        if turn >= 0:
            walls.append(wall)
            timed.append(run)
    return walls, timed


def _wall(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return (perf_counter() - start) * 1e6


def _check(model: object, inputs: object, runs: int, threads: int | None) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidInputError(f"profile takes a model, not {type(model).__name__}")
    if not isinstance(inputs, tuple | list):
        raise InvalidInputError(
            f"profile takes a tuple of inputs, not {type(inputs).__name__}; one input x is (x,)"
        )
    if runs < 1 or (threads is not None and threads < 1):
        raise InvalidInputError(
            f"runs and threads must be at least 1, not runs={runs}, threads={threads}"
        )


def _group(name: str, steps: Sequence[ProfiledStep], total: float) -> Group:
    taken = sum(step.microseconds for step in steps)
    operations = 2 * sum(step.step.multiply_adds for step in steps)
    return Group(
        name,
        len(steps),
        taken,
        taken / total if total else 0.0,
        operations / taken / 1e3 if operations and taken else None,
        sum(step.bound_us for step in steps) / taken if taken else None,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
