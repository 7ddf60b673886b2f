"""What this CPU can do at best: int8 operations, and bytes moved, a second.

Both are measured, once a process and number of threads, with x86quant's own kernels: a clock
frequency or a data sheet says little about a virtual core.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch.fx import Graph, GraphModule

from x86quant import extension
from x86quant.hardware.cpu import Cpu, cpu
from x86quant.lowering.graph_tools import add_constant, emit
from x86quant.profiling.run_step import RunStep
from x86quant.runtime import Segment

#: Convolutions whose operands stay in L1 and L2, as (channels, pixels a side, kernel): the shapes
#: on which the native kernels of one ISA level or another come nearest to the CPU's limit. Kernels
#: of 3 × 3 are not among them: Winograd's algorithm multiplies less than is counted.
PEAK_SHAPES = ((64, 28, (5, 5)), (128, 28, (5, 5)), (256, 16, (3, 1)), (512, 16, (1, 1)))
#: Without VNNI the sums of four products with such weights fit 16 bits: the quickest to multiply.
_LARGEST_WEIGHT = 31
_PEAK_ROUNDS = 40
_COPY_ROUNDS = 12
#: Where the rounds take this long, on an emulated CPU say, three of them have to do.
_ENOUGH_SECONDS = 0.5
_L2_IF_UNKNOWN = 1 << 20
_MOST_COPIED = 256 << 20


@dataclasses.dataclass(frozen=True)
class MemoryLevel:
    """A level of memory.

    Attributes:
        name: "L2", "L3" or "memory".
        holds: bytes it holds; None for all.
        gb_per_s: how fast bytes are read and written in it, by all threads together.
    """

    name: str
    holds: int | None
    gb_per_s: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The best that ``threads`` threads of this CPU can do.

    Attributes:
        isa: the ISA level it was measured at.
        threads: how many.
        gops: 10⁹ int8 operations a second: two a multiply-add.
        levels: of memory, from fast to slow.
    """

    isa: str
    threads: int
    gops: float
    levels: tuple[MemoryLevel, ...]

    def level(self, nbytes: int) -> MemoryLevel:
        """The fastest level that holds ``nbytes``."""
        return next(v for v in self.levels if v.holds is None or nbytes <= v.holds)

    def bound_us(self, step: RunStep, model_bytes: int) -> float:
        """Microseconds that ``step`` needs at least: for its operations, or for its bytes.

        Activations come from the level that holds those of the step, for they were just written.
        Weights come from the level that holds all of the model, for a run streams them in turn.
        """
        at_once = step.activation_bytes // step.parts * min(step.parts, self.threads)
        operations = 2 * step.multiply_adds / self.gops
        moved = (
            step.activation_bytes / self.level(at_once).gb_per_s
            + step.weight_bytes / self.level(model_bytes).gb_per_s
        )
        return max(operations, moved) / 1e3

    def __str__(self) -> str:
        levels = ", ".join(f"{level.name} {level.gb_per_s:.0f}" for level in self.levels)
        plural = "s" if self.threads > 1 else ""
        return f"{self.isa}, {self.threads} thread{plural}: {self.gops:.0f} GOPS; GB/s: {levels}"


@functools.cache
def measure_roofline(threads: int) -> Roofline:
    """Measure, in about half a second; later calls return the same."""
    extension.load()
    this = cpu()
    with using_threads(1):
        gops = threads * max(map(_gops, PEAK_SHAPES))
    with using_threads(threads):
        levels = tuple(_levels(this, threads, _copy_speed))
    return Roofline(this.isa, threads, gops, levels)


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Torch's number of threads, which is global, is ``threads`` inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _gops(shape: tuple[int, int, tuple[int, int]]) -> float:
    channels, pixels, kernel = shape
    segment = _convolution(channels, kernel)
    x = torch.randint(256, (1, channels, pixels, pixels), dtype=torch.uint8)
    x = x.contiguous(memory_format=torch.channels_last)
    best = _least(lambda: float(segment.timed(x)[2].sum()), _PEAK_ROUNDS)
    (step,) = segment.plan([x]).steps
    return 2 * step.multiply_adds / best / 1e3


def _convolution(channels: int, kernel: tuple[int, int]) -> Segment:
    root, graph = torch.nn.Module(), Graph()
    sizes = (channels, channels, *kernel)
    weight = torch.randint(-_LARGEST_WEIGHT, _LARGEST_WEIGHT + 1, sizes, dtype=torch.int8)
    x = graph.placeholder("x")
    node = emit(
        graph,
        "conv",
        x=x,
        weight=add_constant(root, graph, "weight", weight),
        weight_scales=add_constant(
            root, graph, "scales", torch.full((channels,), 1e-3, dtype=torch.float32)
        ),
        bias=None,
        stride=[1, 1],
        padding=[size // 2 for size in kernel],
        dilation=[1, 1],
        groups=1,
        transposed=False,
        output_padding=[0, 0],
        x_scale=1.0,
        x_zp=0,  # as behind a ReLU: padding costs least
        out_scale=1.0,
        out_zp=128,
    )
    graph.output((node,))
    return Segment(GraphModule(root, graph), "roofline")


def _levels(this: Cpu, threads: int, speed: Callable[[int], float]) -> Iterator[MemoryLevel]:
    """Each level of memory, measured by copies that fill half of it."""
    l2 = (this.l2 or _L2_IF_UNKNOWN) * threads
    yield MemoryLevel("L2", l2, speed(l2 // 2))
    if this.l3 is not None and this.l3 > 2 * l2:
        # Of a large L3, shared with others, only a part can be counted on.
        yield MemoryLevel("L3", this.l3, speed(min(this.l3 // 2, 8 * l2)))
    yield MemoryLevel("memory", None, speed(min(max(4 * (this.l3 or 0), 64 * l2), _MOST_COPIED)))


def _copy_speed(working_set: int) -> float:
    """GB/s read and written by the best of some copies within ``working_set`` bytes."""
    half = working_set // 2
    source, target = torch.ones(half, dtype=torch.uint8), torch.zeros(half, dtype=torch.uint8)

    def copy() -> float:
        start = perf_counter()
        target.copy_(source)
        return perf_counter() - start

    return 2 * half / _least(copy, _COPY_ROUNDS) / 1e9


def _least(measured: Callable[[], float], rounds: int) -> float:
    """The least of ``rounds`` times."""
    start, best = perf_counter(), float("inf")
    for number in range(rounds):
        if number >= 3 and perf_counter() - start > _ENOUGH_SECONDS:
            break
        best = min(best, measured())
    return best
