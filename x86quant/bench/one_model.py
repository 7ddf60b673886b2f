"""Measures one model at one setting, every back end interleaved in this one process.

Started by ``campaign``, with the environment set before torch loads:
``python -m x86quant.bench.one_model REQUEST RESULT STAGE``, all paths. A back end that raises is
recorded; one that takes the process down is named in STAGE, and the parent starts again without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import mmap
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from x86quant.bench import backends
from x86quant.bench.alone import AloneError, alone, save_inputs
from x86quant.bench.backends import Backend, Bind, Prepared, Run, Task, first_tensor
from x86quant.bench.instances import measure_instances, split_cores
from x86quant.bench.results import BackendResult, ModelRun, RunSetting, finite
from x86quant.bench.subjects import Subject, shapes_of, subject
from x86quant.bench.turns import WARM_ROUNDS, measure_in_turn, wait_for_idle_threads
from x86quant.errors import TRACEBACK_VARIABLE
from x86quant.files import write_aside
from x86quant.given_model import InputShape, form_of

if TYPE_CHECKING:
    import torch
    from torch import nn

CALIBRATION_SAMPLES, HELD_OUT_SAMPLES = 16, 16
#: The seed of the first inputs that no model is calibrated with.
_HELD_OUT = 1000
COLD_STARTS = 2  # the first one also brings files into memory
# Inductor is the one that may take too long: first, a restart without it loses least. It is also
# the one that minds what others have imported.
PREPARE_FIRST = ("pt2e", "inductor")
STAGE_BYTES = 64


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """What to measure.

    Attributes:
        name: of the model.
        inputs: what it is called with.
        alone: measure cold start and memory too.
        excluded: back ends that took an earlier attempt down, each with how.
    """

    name: str
    inputs: tuple[InputShape, ...]
    setting: RunSetting
    rounds: int
    backends: tuple[str, ...]
    alone: bool = True
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shapes(self) -> str:
        """Of the inputs, as text."""
        return shapes_of(self.inputs)

    def to_json(self) -> str:
        """For the process that measures."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> BenchRequest:
        """What ``to_json`` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["inputs"] = tuple(
            InputShape(tuple(one["sizes"]), one["dtype"], one["name"]) for one in data["inputs"]
        )
        data["setting"] = RunSetting(**data["setting"])
        data["backends"] = tuple(data["backends"])
        return BenchRequest(**data)


class Stage:
    """A few bytes shared with the parent: what is being done, and with which back end."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), STAGE_BYTES)

    def set(self, what: str, name: str) -> None:
        """Costs no system call, so that it can be said before every turn."""
        self._bytes[:] = f"{what} {name}".encode()[:STAGE_BYTES].ljust(STAGE_BYTES)

    @staticmethod
    def read(path: Path) -> tuple[str, str]:
        """What, and which back end; both empty before the first."""
        what, _, name = path.read_bytes().decode(errors="replace").strip(" \0").rpartition(" ")
        return what, name


def sqnr_db(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    noise = (expected - actual).square().sum()
    return float(10 * (expected.square().sum() / noise).log10())


def task_of(request: BenchRequest, found: Subject, model: nn.Module) -> Task:
    """What back ends prepare: ``model``, calibration data and an example."""
    count = max(1, CALIBRATION_SAMPLES // request.setting.batch)
    return Task(
        model,
        form_of(model),
        [found.arguments(seed) for seed in range(1, 1 + count)],
        found.arguments(_HELD_OUT),
        request.setting.threads,
        found.name,
    )


class ModelMeasurement:
    """One model while it is being measured."""

    def __init__(self, request: BenchRequest, stage: Stage, folder: Path) -> None:
        self.request, self.stage, self.folder = request, stage, folder
        self.subject: Subject = subject(request.name, request.inputs)
        held_out = max(1, HELD_OUT_SAMPLES // request.setting.batch)
        self.held_out = [self.subject.arguments(_HELD_OUT + seed) for seed in range(held_out)]
        self.example = self.held_out[0]
        self.results: dict[str, BackendResult] = {}

    def run(self) -> ModelRun:
        """Prepare every back end, check it, time those that are right."""
        request = self.request
        about = (request.shapes, self.subject.weights)
        try:
            self.stage.set("building", "the-model")
            with _quiet():
                self.model = self.subject.model()
            self.expected = [first_tensor(self.model(*c.args, **c.kwargs)) for c in self.held_out]
        except Exception as error:  # whatever the user's model raises
            told = f"the model fails on inputs of {request.shapes}: {_told(error)}"
            return ModelRun(request.name, request.setting, *about, error=told)
        task = task_of(request, self.subject, self.model)
        prepared = self._prepare_all(task)
        saved = self._saved(prepared)
        if request.setting.instances > 1:
            self._measure_instances(prepared, saved)
        else:
            self._measure({name: p.bind(self.example) for name, p in prepared.items()})
        if request.alone:
            for name, folder in saved.items():
                self._measure_alone(name, folder)
        results = {name: self.results[name] for name in request.backends}
        return ModelRun(request.name, request.setting, *about, results)

    def _prepare_all(self, task: Task) -> dict[str, Prepared]:
        found = {}
        for name in sorted(self.request.backends, key=lambda name: name not in PREPARE_FIRST):
            if (reason := self.request.excluded.get(name)) is not None:
                self.results[name] = BackendResult("failed", reason)
            elif (one := self._prepare(name, task)) is not None:
                found[name] = one
        return found

    def _prepare(self, name: str, task: Task) -> Prepared | None:
        found: Backend = backends.backend(name)
        reason = backends.missing(found) or found.refusal(task)
        if reason is not None:
            self._record(name, BackendResult("skipped", reason))
            return None
        self.stage.set("preparing", name)
        start = time.perf_counter()
        try:
            with _quiet():
                prepared = found.prepare(task)
                seconds = time.perf_counter() - start
                self.stage.set("checking", name)
                ratio = self._check(prepared.bind)
        # Whatever a back end trips over is its result on this model, and the others go on.
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                traceback.print_exc()
            self._record(name, BackendResult("failed", _told(error)))
            return None
        self._record(
            name,
            BackendResult(
                "ok",
                method=prepared.method,
                sqnr_db=finite(ratio) if name != "fp32" and task.form == "float" else None,
                prepare_seconds=seconds,
            ),
        )
        return prepared

    def _check(self, bind: Bind) -> float:
        import torch

        actual = [first_tensor(bind(x)()).clone().float() for x in self.held_out]
        for got, wanted in zip(actual, self.expected, strict=True):
            if got.shape != wanted.shape or not got.isfinite().all():
                raise ValueError(f"the output, of shape {tuple(got.shape)}, is wrong or not finite")
        expected = torch.cat([x.flatten() for x in self.expected]).float()
        return sqnr_db(expected, torch.cat([x.flatten() for x in actual]))

    def _measure(self, runs: Mapping[str, Run]) -> None:
        if not runs:
            return
        total = WARM_ROUNDS + self.request.rounds
        times = measure_in_turn(
            runs,
            self.request.rounds,
            settle=wait_for_idle_threads if self.request.setting.threads > 1 else lambda: None,
            turn=lambda number, name: self.stage.set(f"measuring round {number} of {total}", name),
        )
        for name, seconds in times.items():
            self.results[name] = dataclasses.replace(self.results[name], seconds=seconds)

    def _saved(self, prepared: Mapping[str, Prepared]) -> dict[str, Path]:
        """The folders of those that can run in a process of their own."""
        found = {}
        if not self.request.alone and self.request.setting.instances == 1:
            return {}
        for name, one in prepared.items():
            reason = "what it compiles cannot be saved" if one.save is None else ""
            folder = self.folder / name
            if one.save is not None:
                folder.mkdir()
                try:
                    self.stage.set("saving", name)
                    with _quiet():
                        one.save(folder)
                    save_inputs(self.example, folder)
                    found[name] = folder
                except Exception as error:  # as in ``_prepare``
                    reason = f"cannot be saved: {_told(error)}"
            self.results[name] = dataclasses.replace(self.results[name], alone_reason=reason)
        return found

    def _measure_instances(
        self, prepared: Mapping[str, Prepared], saved: Mapping[str, Path]
    ) -> None:
        setting = self.request.setting
        cores = split_cores(sorted(os.sched_getaffinity(0)), setting.instances)
        times = measure_instances(
            saved,
            cores,
            setting.threads,
            self.request.rounds,
            turn=lambda number, name: self.stage.set(f"running instances, round {number}", name),
        )
        for name in prepared:
            taken = times.get(name, self.results[name].alone_reason)
            if isinstance(taken, str):
                self._record(name, BackendResult("failed", taken))
            else:
                self.results[name] = dataclasses.replace(self.results[name], seconds=taken)

    def _measure_alone(self, name: str, folder: Path) -> None:
        if self.results[name].status != "ok":
            return
        seconds, peaks = [], []
        try:
            for _ in range(COLD_STARTS):
                self.stage.set("starting", name)
                with alone(name, folder, self.request.setting.threads) as process:
                    answer = process.answer()
                seconds.append(answer["seconds"])
                peaks.append(answer["peak_bytes"])
        except AloneError as error:
            self.results[name] = dataclasses.replace(self.results[name], alone_reason=str(error))
            return
        self.results[name] = dataclasses.replace(
            self.results[name], cold_start_seconds=min(seconds), peak_bytes=min(peaks)
        )

    def _record(self, name: str, result: BackendResult) -> None:
        self.results[name] = result
        detail = result.reason
        if result.status == "ok":
            detail = f"in {result.prepare_seconds:.1f} s"
            if result.sqnr_db is not None:
                detail += f", SQNR {result.sqnr_db:.1f} dB"
        label = "prepared" if result.status == "ok" else result.status.upper()
        print(f"  {name}: {label} {detail}", file=sys.stderr, flush=True)


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what libraries say away from the report."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def measure(request: BenchRequest, stage: Path) -> ModelRun:
    """Measure in this process; files beside ``stage``."""
    import torch

    torch.manual_seed(0)
    # Progress alone is for stderr; what goes wrong comes as an exception.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return ModelMeasurement(request, Stage(stage), stage.parent).run()


def main(request: Path, result: Path, stage: Path) -> None:
    """Read the request, measure, write the result."""
    import torch

    wanted = BenchRequest.from_json(request.read_text())
    torch.set_num_threads(wanted.setting.threads)
    logging.disable(logging.WARNING)
    write_aside(result, json.dumps(dataclasses.asdict(measure(wanted, stage))))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
    # Thread pools of seven libraries; none is owed an orderly end, and one may hang or crash.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
