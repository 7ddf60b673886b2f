"""What ``quantize`` leaves behind in the process: nothing, in attributes and in behaviour."""

from __future__ import annotations

import gc
import linecache
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # what has compiled nothing need not look
from torch import nn

import x86quant
from x86quant.calling.wording import alone

CODE = """
import torch, torch.nn.functional as F
from torch import nn

import x86quant

HOLDERS = (torch, torch.Tensor, torch._C.TensorBase, F, nn.Module, nn.Linear, nn.Conv2d)


def attributes():
    return {(holder, name): id(value) for holder in HOLDERS for name, value in vars(holder).items()}


class Sequence:
    def __len__(self):
        return 2

    def __getitem__(self, n):
        return (1, 2)[n]


def behaviour():
    x = torch.arange(6.0).reshape(2, 3)
    ways = {
        "tensors of one": lambda: torch.tensor([x.max(), x.min()]),
        "rows": lambda: torch.tensor([r.sum() for r in x]),
        "sequence": lambda: torch.tensor(Sequence()),
        "cut": lambda: x[:, :2],
        "index": lambda: [10, 20, 30][torch.tensor(1)],
        "iterate": lambda: [len(r) for r in x],
        "length of one": lambda: len(x[0, 0]),
        "factories": lambda: (torch.arange(3), torch.zeros(2), torch.full((2,), 1.0)),
        "trace": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3))).code,
        "function modes": torch._C._len_torch_function_stack,
        "dispatch modes": torch._C._len_torch_dispatch_stack,
        "default dtype": torch.get_default_dtype,
        "grad": torch.is_grad_enabled,
        "threads": torch.get_num_threads,
        "engine": lambda: torch.backends.quantized.engine,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "random": lambda: torch.initial_seed(),
    }
    found = {}
    for name, way in ways.items():
        try:
            found[name] = repr(way())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(32, 32)
        self.register_buffer("places", torch.randn(1, 8, 64))

    def forward(self, x):
        x = self.conv(x) + self.places[:, :, : x.size(2)]
        return self.head(x.reshape(x.size(0), *x.shape[1:]))


torch.fx.symbolic_trace(nn.Linear(3, 3))  # what torch itself leaves behind
net = Net().eval()
torch.export.export(net, (torch.randn(2, 8, 32),))
x86quant.quantize(nn.Linear(8, 8), mode="dynamic", progress=False)  # what is imported on first use
before = attributes(), behaviour()
int8 = x86quant.quantize(
    net, [torch.randn(2, 8, 32)] * 2, mode="MODE", speed_check=False, progress=False
)
int8(torch.randn(2, 8, 32))
x86quant.save(int8, "FILE")
x86quant.load("FILE", **({} if "MODE" == "static" else {"model": Net()}))
after = attributes(), behaviour()
behaves = {k: (v, after[1][k]) for k, v in before[1].items() if v != after[1][k]}
assert not behaves, behaves
changed = {k for k in before[0].keys() | after[0].keys() if before[0].get(k) != after[0].get(k)}
# Packages that torch imports when they are first used become attributes of it.
changed = {(h, n) for h, n in changed if type(vars(h).get(n)).__name__ != "module"}
assert not changed, changed
"""


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_the_process_is_as_it_was(mode: str, tmp_path) -> None:
    code = CODE.replace("MODE", mode).replace("FILE", str(tmp_path / "net.x86q"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_two_threads_leave_torch_compile_as_it_was() -> None:
    first_in, second_waits, first_out = (threading.Event() for _ in range(3))

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    def first() -> None:
        with alone():
            first_in.set()
            second_waits.wait(10)
            time.sleep(0.2)  # until it stands in front
        first_out.set()

    def second() -> None:
        first_in.wait(10)
        second_waits.set()
        with alone():
            assert first_out.wait(10)

    compiled: list[torch.fx.GraphModule] = []
    threads = [threading.Thread(target=one) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.compile(lambda x: x + 1, backend=count)(torch.ones(2))
    assert compiled


def _known_sources() -> int:
    return sum(name.startswith("<eval_with_key>") for name in linecache.cache)


def test_sources_of_graphs_go_with_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    path = tmp_path / "net.x86q"

    def once() -> None:
        module = x86quant.quantize(model, [x], speed_check=False, progress=False)
        x86quant.save(module, path)
        x86quant.load(path)(x)
        gc.collect()

    for _ in range(3):
        once()
    known = _known_sources()
    for _ in range(3):
        once()
    assert _known_sources() <= known


def test_sources_of_graphs_that_live_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    kept = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8)))
    path = tmp_path / "net.x86q"
    module = x86quant.quantize(nn.Linear(8, 8), [x], speed_check=False, progress=False)
    x86quant.save(module, path)
    for _ in range(3):
        x86quant.load(path)(x)
        gc.collect()
    for graph in (kept, module.graph_module):
        assert linecache.getlines(type(graph).forward.__code__.co_filename)
