"""How much faster networks become on many cores: a model, fed by what a few cores can measure.

    python -m benchmarks.scaling [--networks resnet50 mobilenet_v2] [--rounds 20]

Measured: the time of every step on one thread, what a shared loop costs two threads that stay
together (``kernels/runtime/team.h``), and how fast one thread and two read what L2 does not hold.
The model:

- a step is shared among as many threads as its own time deserves, by the rule of
  ``kernels/runtime/parallel.h``;
- its time divides by these, but for shares that cannot be equal, and each thread adds its part of
  the loop's cost;
- weights that the cores' L2 caches together do not hold are read again by every run. Cores read
  side by side: each time their number doubles, as much faster as two do than one;
- threads that work side by side may each be slower than one alone: that is measured for two;
- what lies between steps stays on one thread.

The prediction for two threads stands beside what two threads take in the same run, in turn with
one. What it says of more cores nobody has measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch

import x86quant
from benchmarks.artifacts import converted
from benchmarks.environment import print_environment
from benchmarks.networks import NETWORKS, torchvision_model
from x86quant import extension
from x86quant.hardware.cpu import cpu
from x86quant.profiling import Profile, profile
from x86quant.profiling.roofline import measure_roofline

CORES = (1, 2, 4, 8, 16, 32, 64)

#: Microseconds of a step that is left to one thread: ``kShort`` there.
_SHORT = 8.0
#: Nanoseconds that a loop is taken to cost each thread when it is decided how many share a step:
#: ``kTogether`` in ``kernels/runtime/parallel.h``.
_ASSUMED = 500.0
#: What one item of a step is, roughly: so many pixels of so many channels.
_PIXELS, _CHANNELS = 12, 32
_SIZE = 224
_LOOPS = 20_000
_WARM, _TIMED = 5, 5  # runs a turn: threads that slept, and caches, take a few


@dataclasses.dataclass(frozen=True)
class Machine:
    """What sharing costs, and how fast weights come.

    Attributes:
        loop_us: microseconds of an empty loop on two threads.
        l2: bytes that a core keeps to itself.
        gb_per_s: how fast one thread reads what is beyond; two together.
        side_by_side: the speed of each of two threads that multiply, over that of one alone: less
            than 1 where the two CPUs share a core, or its clock.
    """

    loop_us: float
    l2: int
    gb_per_s: tuple[float, float]
    side_by_side: float

    def loop(self, threads: int) -> float:
        """Microseconds of an empty loop: the leader meets the others one by one."""
        return self.loop_us * (threads - 1)

    def reading(self, size: int, threads: int) -> float:
        """Microseconds for so many bytes."""
        one, two = self.gb_per_s
        return size / (one * max(1.0, two / one) ** math.log2(threads)) / 1e3


@dataclasses.dataclass(frozen=True)
class Step:
    """A step as the model sees it.

    Attributes:
        us: microseconds on one thread.
        items: of which it can be made.
        weights: bytes.
    """

    us: float
    items: int
    weights: int

    def on(self, cores: int, machine: Machine, *, streamed: bool, streamed_by_one: bool) -> float:
        """Its time on so many cores; whether its weights come from beyond L2, there and on one."""
        threads = min(cores, self.items, math.isqrt(int(self.us * 1e3 / _ASSUMED)))
        reading = machine.reading(self.weights, 1) if streamed_by_one else 0.0
        computing = max(
            self.us - reading, self.us / 2
        )  # some is read while something is multiplied
        if threads < 2 or self.us < _SHORT:
            return computing + (machine.reading(self.weights, 1) if streamed else 0.0)
        most = math.ceil(self.items / threads) / self.items
        again = machine.reading(self.weights, threads) if streamed else 0.0
        return (
            computing * most / machine.side_by_side
            + min(again, self.us / threads)
            + machine.loop(threads)
        )


def steps_of(measured: Profile) -> list[Step]:
    """What the model takes of a profile."""
    found = []
    for one in measured:
        output = one.step.output
        channels = output[1] if len(output) > 1 else 1
        pixels = math.prod(output) // max(1, channels)
        items = math.ceil(pixels / _PIXELS) * math.ceil(channels / _CHANNELS)
        found.append(Step(one.microseconds, max(1, items), one.step.weight_bytes))
    return found


def predicted(steps: Sequence[Step], between: float, machine: Machine, cores: int) -> float:
    """Microseconds of a run on so many cores."""
    weights = sum(step.weights for step in steps)
    streamed, by_one = weights > cores * machine.l2, weights > machine.l2
    times = [step.on(cores, machine, streamed=streamed, streamed_by_one=by_one) for step in steps]
    return sum(times) + between


def this_machine() -> Machine:
    """What is measured once."""
    torch.set_num_threads(2)
    extension.load()
    loops = extension.native().loop_nanoseconds
    loop = min(loops(_LOOPS, 2, 0.0, True) for _ in range(5)) / 1e3
    speeds = []
    one, two = (measure_roofline(threads) for threads in (1, 2))
    for levels in (one.levels, two.levels):
        speeds.append(next((level for level in levels if level.name == "L3"), levels[-1]).gb_per_s)
    side_by_side = min(1.0, two.gops / one.gops / 2)
    return Machine(loop, cpu().l2 or 1 << 20, (speeds[0], speeds[1]), side_by_side)


def measured_speedup(run: Callable[[], object], rounds: int) -> float:
    """The time of one thread over that of two, which take turns."""
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for threads, taken in times.items():
            torch.set_num_threads(threads)
            for _ in range(_WARM):
                run()
            for _ in range(_TIMED):
                start = time.perf_counter()
                run()
                taken.append(time.perf_counter() - start)
    return statistics.median(times[1]) / statistics.median(times[2])


def row(name: str, machine: Machine, rounds: int) -> str:
    """A line of the table."""
    model = torchvision_model(name)
    x = torch.randn(1, 3, _SIZE, _SIZE).contiguous(memory_format=torch.channels_last)
    compiled = x86quant.compile(converted(model, x), (x,))
    one = profile(compiled, (x,), runs=rounds, threads=1)
    steps = steps_of(one)
    times = [predicted(steps, one.between_us, machine, cores) for cores in CORES]
    speedups = "".join(f"{times[0] / time:>7.2f}" for time in times)
    with torch.no_grad():
        two = measured_speedup(lambda: compiled(x), rounds)
    return f"{name:<20}{one.steps_us / 1e3:>9.2f}{speedups}{two:>11.2f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # stock PyTorch's own
    print_environment()
    machine = this_machine()
    apart = extension.native().loop_nanoseconds(_LOOPS, 2, 0.0, False) / 1e3
    print(
        f"a shared loop on two threads: {machine.loop_us:.2f} µs together, "
        f"{apart:.2f} µs when gathered for it; beyond L2 one thread reads "
        f"{machine.gb_per_s[0]:.0f} GB/s, two {machine.gb_per_s[1]:.0f}; "
        f"beside another each multiplies at {machine.side_by_side:.0%} of its speed\n"
    )
    cores = "".join(f"{n:>7}" for n in CORES)
    print(f"{'predicted, cores':<20}{'ms on 1':>9}{cores}{'measured 2':>11}")
    for name in options.networks:
        print(row(name, machine, options.rounds), flush=True)


if __name__ == "__main__":
    main()
