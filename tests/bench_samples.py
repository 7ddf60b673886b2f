"""Results of ``x86quant bench`` that nobody had to measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from x86quant.bench import campaign, one_model
from x86quant.bench.results import BackendResult, BenchResults, ModelRun, RunSetting

SETTING = RunSetting(batch=1, threads=1)


def ran(
    milliseconds: float, sqnr_db: float | None = 30.0, minimum: float | None = None
) -> BackendResult:
    """A back end that took so long."""
    fastest = milliseconds if minimum is None else minimum
    seconds = (fastest / 1e3, milliseconds / 1e3, milliseconds / 1e3)
    return BackendResult("ok", "", "static", seconds, sqnr_db, 1.0, 0.5, 200_000_000)


def model_run(name: str, inputs: str = "1×3", **of: BackendResult | float) -> ModelRun:
    """A run, of times in milliseconds or whole results; ``_`` in a name is a hyphen."""
    results = {
        key.replace("_", "-"): value if isinstance(value, BackendResult) else ran(value)
        for key, value in of.items()
    }
    return ModelRun(name, SETTING, inputs, "random", results)


def bench_results(*runs: ModelRun, cpu: str = "a CPU", rounds: int = 3) -> BenchResults:
    """A file's worth."""
    environment = {"cpu": cpu, "date": "2026-01-01T00:00", "command": "x86quant bench <net>"}
    return BenchResults({**environment, "version of torch": "2.13"}, rounds, runs)


def measure_in_this_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """``x86quant bench`` starts no process."""
    stage = folder / "stage"
    stage.write_bytes(b" " * one_model.STAGE_BYTES)
    monkeypatch.setattr(campaign, "measure_apart", lambda one: one_model.measure(one, stage))
