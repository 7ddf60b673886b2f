"""Tests never see what the developer has in the cache folder, nor leave anything there."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Workers of pytest-xdist share the cores, so threads of each would get in each other's way. Tests
# of several threads ask for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers give way to other processes: beside another worker's tests they would stand still.
os.environ.setdefault("RAY_worker_niceness", "0")

# What nobody foresaw is seen, instead of described.
os.environ["X86QUANT_TRACEBACK"] = "1"

import numpy as np
import torch
from torch.fx import GraphModule

from x86quant.lowering.op_spec import check_graph
from x86quant.lowering.passes import Pass, Report, run_pass
from x86quant.quantization.deciding import layers_in_float
from x86quant.torchvision_import import import_torchvision

import_torchvision()  # transformers and torchao import it where it is installed


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own() -> Iterator[None]:
    """An empty cache folder, for subprocesses too."""
    folder = tempfile.mkdtemp(prefix="x86quant_tests_")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = folder
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sees must not depend on times: ``quantize`` finds nothing slower."""
    monkeypatch.setattr("x86quant.quantization.speed.can_tell", lambda: False)


@pytest.fixture(scope="session", autouse=True)
def every_pass_keeps_the_graph_valid() -> Iterator[None]:
    """After each pass, whatever test it runs in, the graph is one that the runtime could take."""

    def checked(one: Pass, gm: GraphModule) -> Report:
        report = run_pass(one, gm)
        check_graph(gm)
        return report

    patch = pytest.MonkeyPatch()
    patch.setattr("x86quant.lowering.passes.run_pass", checked)
    yield
    patch.undo()


@pytest.fixture
def any_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of random weights keep their int8 layers where trained ones would lose some."""
    monkeypatch.setattr(layers_in_float, "ENOUGH_DB", layers_in_float.USABLE_DB)


@pytest.fixture
def as_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that nobody foresaw are described in a sentence."""
    monkeypatch.delenv("X86QUANT_TRACEBACK")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test draws the same numbers alone, and behind any other; so do the fixtures made for it."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - of libraries that draw from it
