"""Tests never see what the developer has in the cache folder, nor leave anything there."""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

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
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import attribute
from x86quant.lowering.op_spec import check_graph
from x86quant.lowering.passes import Pass, Report, run_pass
from x86quant.lowering.tensor_memory import tensors_of, version_of
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
    before: list[Any] = []

    def checked(one: Pass, gm: GraphModule) -> Report:
        nonlocal before
        report = run_pass(one, gm)
        # Most passes find nothing to do in most graphs, and a check takes longer than they do.
        if (said := _said_of(gm)) != before:
            before = []
            check_graph(gm)
            before = said
        return report

    patch = pytest.MonkeyPatch()
    patch.setattr("x86quant.lowering.passes.run_pass", checked)
    yield
    patch.undo()


def _said_of(gm: GraphModule) -> list[Any]:
    """All that a check of ``gm`` looks at, without keeping any of it alive."""
    nodes = list(gm.graph.nodes)
    calls = [
        (n.name, n.op, n.target, repr(map_arg((n.args, n.kwargs), lambda x: f"%{x.name}")))
        for n in nodes
    ]
    modules = [name for name, _ in gm.named_modules()]
    held = tensors_of([attribute(gm, n.target) for n in nodes if n.op == "get_attr"])
    return [weakref.ref(gm), calls, modules, [(id(x), version_of(x)) for x in held]]


@pytest.fixture
def any_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of random weights keep their int8 layers where trained ones would lose some."""
    monkeypatch.setattr(layers_in_float, "ENOUGH_DB", layers_in_float.USABLE_DB)


@pytest.fixture
def as_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that nobody foresaw are described in a sentence."""
    monkeypatch.delenv("X86QUANT_TRACEBACK")


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage need not look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test draws the same numbers alone, and behind any other; so do the fixtures made for it."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - of libraries that draw from it
