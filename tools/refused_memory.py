"""Refuses memory to the compiled part at every allocation of a call, in turn, within Python.

    python -m tools.refused_memory
    python -m tools.refused_memory --scenario cnn --libraries x86quant/ libc10 libtorch_cpu

Each scenario is something a user does: a call of several kinds of models, a load with its first
call, which packs weights. It is run once for each
allocation that the compiled part makes in it, which is refused. Wanted: an exception that says so,
or the right answer without that memory; and the same once more, with memory, gives the right
answer. Allocations of other libraries go on, unless they are named: torch's own do not all end
with an exception.

A library that is preloaded counts the allocations and refuses one (``refused_memory.cpp``). What
serving programs is made of has the same in ``tools/sanitize_serving.py``. Needs Linux and a C++
compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.soak import made
from tools.sanitize_serving import Tagger

_SOURCE = Path(__file__).with_suffix(".cpp")
#: What memory that is refused may be told as.
_TOLD = (MemoryError,)

#: What is made before memory is refused, and what is done then; the tensors are its answer.
Scenario = Callable[[], Callable[[], Sequence[torch.Tensor]]]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [
        x for one in (value.values() if isinstance(value, dict) else value) for x in _tensors(one)
    ]


def _loads(model: nn.Module, x: torch.Tensor, folder: Path) -> Scenario:
    path = folder / "net.x86q"
    x86quant.save(model, path)
    return lambda: lambda: [x86quant.load(path)(x)]


def scenarios(folder: Path) -> dict[str, Scenario]:
    """What is tried, by name."""
    torch.manual_seed(0)
    found: dict[str, Scenario] = {}
    for work in made():
        call = work.calls[-1]
        found[work.name] = lambda call=call: lambda: _tensors(call())
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.Flatten(1)).eval()
    x = torch.randn(2, 8, 6, 6)
    model = x86quant.quantize(net, [x, x], speed_check=False, progress=False)
    found["load"] = _loads(model, x, folder)
    steps = torch.randn(3, 5, 4), torch.randn(1, 3, 5), torch.randn(1, 3, 8)
    tagger = x86quant.quantize(Tagger().eval(), [steps], speed_check=False, progress=False)
    found["recurrent"] = lambda: lambda: _tensors(tagger(*steps))
    return found


def tried(name: str, scenario: Scenario, library: Any) -> bool:
    """Whether every refusal is told or borne, and what follows is right; says how many."""
    found: list[str] = []
    right = [x.clone() for x in scenario()()]

    def is_right(answer: Sequence[torch.Tensor]) -> bool:
        return len(answer) == len(right) and all(
            torch.equal(a, b) for a, b in zip(answer, right, strict=True)
        )

    number = told = 0
    while True:
        number += 1
        act = scenario()
        if sys.stderr.isatty():  # before the call: a process that ends says where
            print(f"\r{name}: {number}", end="", file=sys.stderr, flush=True)
        library.refuse_begin(ctypes.c_long(number))
        try:
            answer = act()
        except _TOLD as error:
            answer = None
            told += 1
            reason = error
        finally:
            count = library.refuse_end()
        if count < number:
            break
        if answer is not None and not is_right(answer):
            found.append(f"allocation {number}: another answer")
        try:
            if not is_right(act()):
                found.append(f"allocation {number}: another answer the next time")
        except _TOLD as error:
            found.append(f"allocation {number} ({reason}): the next call fails: {error}")
    print(
        f"{name:<12} {number - 1:5} refused, {told} told, {number - 1 - told} done without: "
        f"{len(found)} findings", flush=True
    )  # fmt: skip
    for line in found:
        print(f"  {line}")
    return not found and number > 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all scenarios; 1 if anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", action="append", help="default: all")
    parser.add_argument("--libraries", nargs="+", default=["/x86quant/"], metavar="PART")
    options = parser.parse_args(arguments)
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "refuse_begin"):
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, "refused.so")
            compiler = os.environ.get("CXX", "c++").split()
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(built), str(_SOURCE)]
            subprocess.run([*compiler, *flags], check=True)
            command = [sys.executable, "-W", "ignore", "-m", "tools.refused_memory", *sys.argv[1:]]
            environment = {**os.environ, "LD_PRELOAD": str(built)}
            return subprocess.run(command, env=environment, check=False).returncode
    warnings.simplefilter("ignore")
    library.refuse_end.restype = ctypes.c_long
    with tempfile.TemporaryDirectory() as folder:
        known = scenarios(Path(folder))
        if unknown := set(options.scenario or ()) - {*known}:
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
        for part in options.libraries:
            library.refuse_add(part.encode())
        found = [tried(x, known[x], library) for x in options.scenario or known]
    return 0 if all(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
