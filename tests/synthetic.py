"""Measurements made up by a formula, so that the best rules are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from x86quant.spec import OpSpec
from x86quant.tuning.measurement_files import PROVENANCE, write
from x86quant.tuning.measurements import Case, Measurement, MeasurementSet

MACHINE = "GenuineIntel-6-143"
#: Microseconds by kernel; a text is a status without a time.
Times = Mapping[str, "float | str"]


def conv(channels: int, outputs: int | None = None, size: int = 14, **fields: Any) -> OpSpec:
    """A 3×3 convolution that keeps its ``size``."""
    values: dict[str, Any] = {
        "kernel": (3, 3),
        "stride": (1, 1),
        "padding": (1, 1),
        "dilation": (1, 1),
        "output_padding": (0, 0),
        "dynamic": False,
        "batch": 1,
        "rows": size * size,
        "spatial": (size, size),
        "threads": 1,
    }
    return OpSpec("conv2d", channels, outputs or channels, **{**values, **fields})


def linear(inputs: int, outputs: int, rows: int, **fields: Any) -> OpSpec:
    """A static linear."""
    return OpSpec(
        "linear", inputs, outputs, rows=rows, **{"dynamic": False, "threads": 1, **fields}
    )


def case(spec: OpSpec, *nets: str, caller: Any = "stock", isa: str = "amx_int8") -> Case:
    return Case(MACHINE, isa, caller, spec, "hot", tuple((net, 1) for net in nets))


def measure(cases: Iterable[Case], times: Callable[[Case], Times]) -> MeasurementSet:
    """Every case with the candidates and times that the formula gives; noise of 1%.

    A name that ends in "?" is that kernel with narrow weights.
    """
    found = []
    for one in cases:
        known = {name: t for name, t in times(one).items() if isinstance(t, float | int)}
        for name, t in times(one).items():
            if isinstance(t, str):
                status, _, note = t.partition(": ")
                found.append(Measurement(one, name, status, note=note or status))  # type: ignore[arg-type]
            else:
                note = "narrow weights only: x" if name.endswith("?") else ""
                tie = len(known) > 1 and t <= min(known.values()) * 1.03
                times_us = (t, t * 0.99, t * 1.01, t * 0.98)
                found.append(Measurement(one, name.rstrip("?"), "ok", *times_us, 9, tie, note))
    return MeasurementSet(tuple(found), provenance())


def provenance(**changes: str) -> dict[str, str]:
    import importlib.metadata

    here = {name: importlib.metadata.version(name) for name in ("torch", "x86quant")}
    return dict.fromkeys(PROVENANCE, "made up") | here | {"date": "2026-01-01"} | changes


def example_cases(nets: int = 5) -> list[Case]:
    """Networks of linears at several rows and of plain, grouped and depthwise convolutions."""
    cases = []
    for n in range(nets):
        net, wide = f"net{n}", 16 * (2 * n + 3)  # no two networks share a layer
        for layer in range(3):
            channels = wide * 2**layer
            for rows in (1, 4, 16, 64, 256):
                cases.append(case(linear(channels, channels * 2 + n, rows), net))
            cases.append(case(conv(channels, channels + 16 * n), net))
            cases.append(case(conv(channels, groups=channels), net))
            cases.append(case(conv(channels, groups=channels // 4), net))
    return cases


def example_times(one: Case) -> Times:
    """FBGEMM is best on few rows, native on depthwise convolutions, oneDNN on all else."""
    spec = one.spec
    if spec.op == "linear":
        few = (spec.rows or 0) < 16
        return {"fbgemm": 10.0 if few else 40.0, "onednn": 30.0 if few else 20.0}
    work = math.sqrt(spec.in_channels)
    best = "native" if spec.depthwise else "onednn"
    return {name: work * (1.0 if name == best else 2.0) for name in ("native", "onednn", "fbgemm")}


def example() -> MeasurementSet:
    return measure(example_cases(), example_times)


def example_file(path: Path, measured: MeasurementSet | None = None) -> Path:
    write(path, measured or example())
    return path
