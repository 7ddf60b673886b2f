"""Few small shapes, and runs of tuning over them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from x86quant.hardware.cpu import cpu
from x86quant.spec import OpSpec
from x86quant.tuning import session
from x86quant.tuning.layer_shapes import with_rows
from x86quant.tuning.measurements import Case, Measurement
from x86quant.tuning.provenance import this_machine
from x86quant.tuning.worker import Worker

FAKE_WORKER = Path(__file__).parents[1] / "fake_tuning_worker.py"


HEADER = "op,net,layer,groups,ic,oc,id,ih,iw,kd,kh,kw,sd,sh,sw,pd,ph,pw,dd,dh,dw"


CONV_LINE = "conv2d,tiny,tiny:one*3,1,8,8,,6,6,,3,3,,1,1,,1,1,,1,1"


LINEAR_LINE = "linear,tiny,tiny:two,1,16,8,,,,,,,,,,,,,,,"


CONV = with_rows(
    OpSpec(
        "conv2d",
        8,
        8,
        1,
        (3, 3),
        (1, 1),
        (1, 1),
        (1, 1),
        (0, 0),
        dynamic=False,
        batch=1,
        spatial=(6, 6),
        threads=1,
    )
)


LINEAR = OpSpec("linear", 16, 8, dynamic=False, rows=4, threads=1)


@pytest.fixture
def shapes_csv(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.csv"
    path.write_text(f"{HEADER}\n{CONV_LINE}\n{LINEAR_LINE}\n")
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def case(spec: OpSpec = CONV, **changes: object) -> Case:
    made = Case(this_machine(), "avx2", "stock", spec, "hot", (("tiny", 3),))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding="same")
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.first(x)))
        return self.last(self.up(x).mean((2, 3)))


def fake_worker(*kernels: str, patience: float = 60.0) -> Callable[[str], Worker]:
    command = [sys.executable, str(FAKE_WORKER), *kernels]
    return lambda level: Worker(level, command, patience)


class InstantWorker:
    """Measures in no time; the clock moves ten seconds a job."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limits: list[float] = []
        self.levels: list[str] = []

    def __call__(self, level: str) -> InstantWorker:
        self.levels.append(level)
        return self

    def __enter__(self) -> InstantWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, cases: list[Case], limit: float) -> list[Measurement]:
        self.now += 10
        self.limits.append(limit)
        return [Measurement(c, "onednn", "ok", 3.0, 2.5, 3.25, 2.0, rounds=9) for c in cases]


_run = session.run


def run(asked: session.Request, worker: InstantWorker) -> session.Outcome:
    return _run(
        asked, site=session.Site(worker=worker), clock=lambda: worker.now, warn=lambda message: None  # type: ignore[arg-type]
    )  # fmt: skip


def graph(spec: OpSpec, kernel: str, median: float) -> Measurement:
    return Measurement(case(spec, caller="graph", isa=cpu().isa), kernel, "ok",
                       median, median, median, median, rounds=9)  # fmt: skip


def stock(spec: OpSpec, kernel: str, median: float, cache: str = "hot") -> Measurement:
    of = case(spec, isa=cpu().isa, cache=cache)
    return dataclasses.replace(graph(spec, kernel, median), case=of)
