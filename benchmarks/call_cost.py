"""What a call of a compiled model costs besides its kernels, and what a new input shape costs.

python -m benchmarks.call_cost

The first tables say where the time of a call goes: each line does less than the one above it. Warm
times are CPU time of this process on one thread: other work on the machine disturbs them least.
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
from x86quant.compiled import CompiledModule

_ROUNDS, _CALLS, _COLD_CALLS = 11, 200, 20

#: Of images whose batches are planned.
_WIDTHS = range(97, 127)


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


def warm(call: Callable[[], object]) -> float:
    """Microseconds of CPU time of one call after others."""
    start = time.process_time()
    for _ in range(_CALLS):
        call()
    return (time.process_time() - start) / _CALLS * 1e6


def cold(call: Callable[[], object], other: torch.Tensor) -> float:
    """The same of one call after ``other``, larger than L2, has passed through the caches.

    A network's weights and activations do that between two calls of a server.
    """
    other.sum()
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def stages(module: CompiledModule, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """From the whole call to its kernel: each does less than the one before."""
    module(x)
    runtime = module._runtime
    assert runtime is not None
    assert runtime.whole is not None
    segment, run = runtime.whole, runtime.whole.plans[-1].program.try_run
    return {
        "module(x)": lambda: module(x),
        "module.forward(x)": lambda: module.forward(x),
        "the segment again": lambda: segment.run_again((x,)),
        "the program alone": lambda: run((x,)),
        "whether weights changed": runtime.is_current,
        "an empty function": lambda: None,
    }


def print_stages(title: str, ways: dict[str, Callable[[], object]]) -> None:
    """Interleaved: each round times every stage once."""
    other = torch.zeros(4 << 20)  # 16 MB
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for _ in range(_ROUNDS):
        for name, call in ways.items():
            times[name][0].append(warm(call))
            times[name][1].extend(cold(call, other) for _ in range(_COLD_CALLS))
    print(f"\n{title + ', µs a call':<44} {'warm':>8} {'least':>8} {'cold':>8} {'least':>8}")
    for name, found in times.items():
        columns = [figure for each in found for figure in (statistics.median(each), min(each))]
        print(f"{name:<44}" + "".join(f" {figure:8.2f}" for figure in columns))


def main() -> None:
    """Print all tables."""
    torch.set_num_threads(1)
    print_environment()
    x = torch.randn(1, 3)
    print_stages("one linear", stages(compiled(nn.Sequential(nn.Linear(3, 3)), x), x))
    x = torch.randn(1, 3, 4, 4)
    deep = compiled(nn.Sequential(nn.Conv2d(3, 8, 3), *(Block(8) for _ in range(49))), x)
    print_stages("99 convolutions", stages(deep, x))
    steps = len(deep.segments[0].plans[-1].steps)
    print(f"\n{f'planning a new shape, {steps} steps, ms':<44} {'median':>8} {'least':>8}")
    for width in _WIDTHS:  # in parts of other sizes than 9 has
        deep.segments[0].plan((torch.empty(8, 3, 96, width),))
    for name, shapes in {
        "another image": [(1, size, 16) for size in range(17, 47)],
        "another batch, whole": [(batch, 8, 8) for batch in range(2, 32)],
        "another batch, in parts": [(batch, 96, 96) for batch in range(2, 32)],
        "another batch, in parts of another size": [(9, 96, size) for size in _WIDTHS],
        "another image of a batch": [(8, size, 64) for size in range(65, 95)],
    }.items():
        new = []
        for batch, height, width in shapes:
            x = torch.randn(batch, 3, height, width)
            start = time.process_time()
            deep.segments[0].plan((x,))
            new.append((time.process_time() - start) * 1e3)
        print(f"{name:<44} {statistics.median(new):8.2f} {min(new):8.2f}")


if __name__ == "__main__":
    main()
