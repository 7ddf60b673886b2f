"""What a call of a compiled model costs besides its kernels, and what a new input shape costs.

python -m benchmarks.call_cost

Times are CPU time of this process on one thread: other work on the machine disturbs them least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx

import x86quant
from benchmarks.environment import print_environment
from x86quant import extension
from x86quant.compiled import CompiledModule

_ROUNDS, _CALLS = 15, 400


class Block(nn.Module):
    """Two convolutions and a sum: two steps of a plan."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Behind a ReLU."""
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def compiled(model: nn.Module, x: torch.Tensor) -> CompiledModule:
    """``model`` in int8, without the care of ``quantize``."""
    prepared = prepare_fx(model.eval(), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    return x86quant.compile(convert_to_reference_fx(prepared), (x,))


def microseconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    for _ in range(_CALLS):
        call()
    return (time.process_time() - start) / _CALLS * 1e6


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    print_environment()
    x = torch.randn(1, 3)
    tiny = compiled(nn.Sequential(nn.Linear(3, 3)), x)
    tiny(x)
    whole = tiny.segments[0]
    program, run = whole.plans[-1].program, extension.try_run()
    handle = program.handle()
    deep = compiled(nn.Sequential(nn.Conv2d(3, 8, 3), *(Block(8) for _ in range(49))),
                    torch.randn(1, 3, 16, 16))  # fmt: skip
    deep(torch.randn(1, 3, 16, 16))
    assert deep._runtime is not None
    ways: dict[str, Callable[[], object]] = {
        "module(x)": lambda: tiny(x),
        "module.forward(x)": lambda: tiny.forward(x),
        "the program alone": lambda: run(handle, (x,)),
        "whether weights changed, 100 layers": deep._runtime.is_current,
        "an empty function": lambda: None,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, call in ways.items():
            times[name].append(microseconds(call))
    for name, found in times.items():
        print(f"{name:<36} {statistics.median(found):7.2f} µs, least {min(found):7.2f}")
    steps = len(deep.segments[0].plans[-1].steps)
    new = []
    for size in range(17, 37):
        x = torch.randn(1, 3, size, 16)
        start = time.process_time()
        deep.segments[0].plan((x,))
        new.append((time.process_time() - start) * 1e3)
    print(f"a new shape, {steps} steps: median {statistics.median(new):.1f} ms")


if __name__ == "__main__":
    main()
