"""What was measured, in memory and as a file that is read back with care."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from x86quant.errors import InvalidInputError

SCHEMA, SCHEMA_VERSION = "x86quant-bench", 1
RESULTS_FILE = "results.json"
#: The back end that the others are compared with.
OURS = "x86quant"

Status = Literal["ok", "skipped", "failed"]


@dataclasses.dataclass(frozen=True)
class RunSetting:
    """What makes two runs of one model comparable."""

    batch: int
    threads: int
    instances: int = 1
    isa: str | None = None

    def __str__(self) -> str:
        parts = [f"batch {self.batch}", _counted(self.threads, "thread")]
        if self.instances > 1:
            parts = [parts[0], f"{self.instances} instances of {parts[1]}"]
        return ", ".join([*parts, *([f"held to {self.isa}"] if self.isa else [])])


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclasses.dataclass(frozen=True)
class BackendResult:
    """One back end on one model.

    Attributes:
        reason: why it was skipped or failed.
        method: how it quantized, in a few words.
        seconds: every timed call in the order they ran, warm-up rounds left out; with several
            instances, for each round the mean time of a call.
        sqnr_db: signal to quantization noise against the float model's result.
        prepare_seconds: what quantizing and compiling took.
        cold_start_seconds: from an empty Python process to the first result.
        peak_bytes: of memory, in that process.
        alone_reason: why the last two are not known.
    """

    status: Status
    reason: str = ""
    method: str = ""
    seconds: tuple[float, ...] = ()
    sqnr_db: float | None = None
    prepare_seconds: float | None = None
    cold_start_seconds: float | None = None
    peak_bytes: int | None = None
    alone_reason: str = ""

    @property
    def median(self) -> float:
        """Seconds a call."""
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        """Seconds of the fastest call."""
        return min(self.seconds)


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """One model at one setting on every back end.

    Attributes:
        inputs: shapes, as text.
        weights: where the weights are from.
        results: by back end, in the order they were asked for.
        error: why there are none.
    """

    model: str
    setting: RunSetting
    inputs: str = ""
    weights: str = ""
    results: Mapping[str, BackendResult] = dataclasses.field(default_factory=dict)
    error: str = ""

    def measured(self, name: str) -> BackendResult | None:
        """The back end's result if it ran and was timed."""
        result = self.results.get(name)
        return result if result is not None and result.status == "ok" and result.seconds else None

    def ratio(self, name: str, over: str = OURS, statistic: str = "median") -> float | None:
        """How many times as long ``name`` takes as ``over``; None unless both ran."""
        slow, fast = self.measured(name), self.measured(over)
        if slow is None or fast is None:
            return None
        return float(getattr(slow, statistic) / getattr(fast, statistic))

    def throughput(self, name: str) -> float | None:
        """Samples a second, over all instances."""
        result = self.measured(name)
        if result is None:
            return None
        return self.setting.batch * self.setting.instances / result.median

    def fastest_first(self) -> list[str]:
        """The back ends that were timed."""
        timed = [name for name in self.results if self.measured(name) is not None]
        return sorted(timed, key=lambda name: self.results[name].median)


@dataclasses.dataclass(frozen=True)
class BenchResults:
    """Everything of one file.

    Attributes:
        environment: CPU, versions, flags, command and date, as name and text.
        rounds: how many times each back end had its turn.
        runs: in the order they were asked for.
    """

    environment: Mapping[str, str]
    rounds: int
    runs: tuple[ModelRun, ...] = ()

    @property
    def backends(self) -> list[str]:
        """All of them, in the order they were asked for."""
        return list(dict.fromkeys(name for run in self.runs for name in run.results))

    def mean_ratio(self, name: str) -> tuple[float, int] | None:
        """The geometric mean of its ratios to ours, and over how many runs; None: no run."""
        ratios = [r for run in self.runs if (r := run.ratio(name, OURS)) is not None]
        return (geometric_mean(ratios), len(ratios)) if ratios else None

    def to_json(self) -> str:
        """The file's text."""
        data = {"schema": SCHEMA, "version": SCHEMA_VERSION, **dataclasses.asdict(self)}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return math.exp(sum(map(math.log, values)) / len(values))


def finite(value: float) -> float | None:
    """None for what JSON has no word for, such as the ratio of a signal to no noise at all."""
    return value if math.isfinite(value) else None


def read_results(path: Path) -> BenchResults:
    """Read a file that ``x86quant bench`` wrote.

    Raises:
        InvalidInputError: it is no such file; says where and what is wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not text
        raise InvalidInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InvalidInputError(f"{path} was not written by x86quant bench: it has no {SCHEMA!r}")
    if data.get("version") != SCHEMA_VERSION:
        raise InvalidInputError(
            f"{path} has version {data.get('version')!r} of the format, and this x86quant reads "
            f"version {SCHEMA_VERSION}: measure again, or use the x86quant that wrote it"
        )
    try:
        return BenchResults(
            _texts(data, "environment"),
            _typed(data, "rounds", int),
            tuple(_run(run) for run in _typed(data, "runs", list)),
        )
    except (InvalidInputError, TypeError) as error:
        raise InvalidInputError(f"{path} is damaged: {error}") from error


def run_from(data: Any) -> ModelRun:
    """A run as ``dataclasses.asdict`` told it."""
    return _run(data)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _typed(data: Any, name: str, kind: type) -> Any:
    if not isinstance(data, dict) or name not in data:
        raise InvalidInputError(f"{name!r} is missing")
    value = data[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidInputError(f"{name!r} is {value!r:.40}, not {kind.__name__}")
    return value


def _texts(data: Any, name: str) -> dict[str, str]:
    return {key: _typed(data[name], key, str) for key in _typed(data, name, dict)}


def _run(data: Any) -> ModelRun:
    setting = _typed(data, "setting", dict)
    counts = {name: _typed(setting, name, int) for name in ("batch", "threads", "instances")}
    if min(counts.values()) < 1:
        raise InvalidInputError(f"the setting {counts} is not of counts of at least 1")
    isa = None if setting.get("isa") is None else _typed(setting, "isa", str)
    results = _typed(data, "results", dict)
    return ModelRun(
        _typed(data, "model", str),
        RunSetting(**counts, isa=isa),
        _typed(data, "inputs", str),
        _typed(data, "weights", str),
        {name: _result(result) for name, result in results.items()},
        _typed(data, "error", str),
    )


def _result(data: Any) -> BackendResult:
    status = _typed(data, "status", str)
    if status not in ("ok", "skipped", "failed"):
        raise InvalidInputError(f"'status' is {status!r}, not ok, skipped or failed")
    seconds = _typed(data, "seconds", list)
    for value in seconds:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise InvalidInputError(f"'seconds' holds {value!r:.40}, not a time")
    numbers = {
        name: None if data.get(name) is None else _typed(data, name, (int, float))  # type: ignore[arg-type]
        for name in ("sqnr_db", "prepare_seconds", "cold_start_seconds", "peak_bytes")
    }
    words = {name: _typed(data, name, str) for name in ("reason", "method", "alone_reason")}
    values: dict[str, Any] = {**words, **numbers}
    return BackendResult(status, seconds=tuple(map(float, seconds)), **values)
