"""Compiled models under copies, workers, tracers and torch.compile."""

from __future__ import annotations

import copy
import inspect
import io
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import x86quant
from tests.compiled.small_modules import (
    SHAPE,
    module,
    parted,
    saved,
    whole,
    write,
    x,
)
from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError

__all__ = ["module", "parted", "whole", "x"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.(trace|save|load):DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),
]


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved]
)
def test_copies_give_the_same(
    copied: Callable[[CompiledModule], Any], module: CompiledModule, x: torch.Tensor
) -> None:
    expected = module.half()(x.half())
    other = copied(module)
    assert torch.equal(other(x.half()), expected)
    assert inspect.signature(other) == inspect.signature(module)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that runs the model, as preprocessing in workers may."""

    def __init__(self, module: CompiledModule, x: torch.Tensor) -> None:
        self.module, self.x = module, x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        result: torch.Tensor = self.module(self.x[index : index + 1])[0]
        return result


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_run_it(method: str, whole: CompiledModule, x: torch.Tensor) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a team of OpenMP threads does not survive a fork
    try:
        module = copy.deepcopy(whole)
        expected = module(x)
        loader = torch.utils.data.DataLoader(
            Rows(module, x), 2, num_workers=1,
            multiprocessing_context=multiprocessing.get_context(method),
        )  # fmt: skip
        assert torch.equal(torch.cat(list(loader)), expected)
    finally:
        torch.set_num_threads(before)


FORKED = """
import multiprocessing, sys, torch, x86quant
from tests.compiled.small_modules import make, nn
module = make(nn.ReLU())
torch.set_num_threads(2)
x = torch.randn(8, 3, 64, 64)
expected = module(x)
def child():
    sys.exit(0 if torch.equal(module(x), expected) else 3)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
if process.exitcode is None:
    process.kill()
    sys.exit("the child hangs")
sys.exit(process.exitcode)
"""


def test_a_process_forked_after_a_threaded_run_does_not_hang() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, cwd=ROOT)


# ------------------------------------------------------------------------ tracers


SHAPES = [SHAPE, (1, 3, 8, 8), (3, 3, 11, 9)]


def test_a_traced_module_is_right_at_every_shape(module: CompiledModule, x: torch.Tensor) -> None:
    module(x)
    traced = torch.jit.trace(module, (x,))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    for form in (traced, torch.jit.load(file)):
        for shape in SHAPES:
            other = torch.randn(shape)
            assert torch.equal(form(other), module(other))


def test_torch_compile_calls_the_native_program(module: CompiledModule, x: torch.Tensor) -> None:
    torch._dynamo.reset()
    fast = torch.compile(module, backend="aot_eager", fullgraph=True)
    report = x86quant.compute_ops(fast, (x,))
    assert [op.detail for op in report.int8] == [
        op.detail for op in x86quant.compute_ops(module, (x,)).int8
    ]
    for shape in SHAPES:
        other = torch.randn(shape)
        assert torch.equal(fast(other), module(other))
    with torch.no_grad():
        write(module)
    assert torch.equal(fast(x), module.graph_module(x))


def test_torch_compile_of_one_module_never_runs_another(
    whole: CompiledModule, x: torch.Tensor
) -> None:
    torch._dynamo.reset()
    one, other = copy.deepcopy(whole), copy.deepcopy(whole)
    write(other)
    for either in (one, other):
        fast = torch.compile(either, backend="aot_eager")
        assert torch.equal(fast(x), either(x))


def test_an_exported_program_needs_nothing_of_the_module(
    whole: CompiledModule, x: torch.Tensor
) -> None:
    module = copy.deepcopy(whole)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=(({0: batch},),))
    assert not any("run_compiled" in str(node.target) for node in program.graph.nodes)
    expected = [module(x), module(x[:1])]
    del module
    assert torch.equal(program.module()(x), expected[0])
    assert torch.equal(program.module()(x[:1]), expected[1])


def test_a_transform_is_refused(whole: CompiledModule, x: torch.Tensor) -> None:
    """Tensors of vmap have no memory of their own to read."""
    module = copy.deepcopy(whole)
    module(x[:1])
    with pytest.raises(InvalidInputError, match="vmap"):
        torch.vmap(lambda one: module(one[None])[0])(x)
