"""How much faster networks become on many cores: a model, fed by what a few cores can measure.

    python -m benchmarks.scaling [--networks resnet50 mobilenet_v2] [--batches 1 64] [--rounds 20]

Measured: the time of every step on one thread, a cache line's way between two cores, and how fast
one thread and two read what L2 does not hold. The model:

- a step is shared among as many threads as its own time deserves, by the rule of
  ``kernels/runtime/parallel.h``;
- its time divides by these, but for shares that cannot be equal, and the loop costs what
  ``benchmarks.loop_simulation`` finds for so many threads, by events;
- a batch of several images is shared image by image, in one loop;
- weights that the cores' L2 caches together do not hold are read again by every run. Cores read
  side by side: each time their number doubles, as much faster as two do than one, up to all cores
  of a node of memory, and beyond that if the weights lie on all nodes;
- threads that work side by side may each be slower than one alone: that is measured for two;
- what lies between steps stays on one thread.

Two designs stand one above the other. ``before``: one word by which a team meets, as many threads
as work/500 ns has the root of, weights on the node that packed them. ``now``: words by groups of
eight, the rule of today, large weights on all nodes.

The prediction for two threads stands beside what two threads take in the same run, in turn with
one. What it says of more cores nobody has measured.

Last, what it says of cutting a machine among processes: images a second in all, and milliseconds
of one, for each number of threads that a process has.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch

import x86quant
from benchmarks.artifacts import converted
from benchmarks.environment import print_environment
from benchmarks.loop_simulation import Costs, by_groups, measured_line, one_word
from benchmarks.networks import NETWORKS, torchvision_model
from x86quant.hardware.cpu import cpu
from x86quant.profiling import Profile, profile
from x86quant.profiling.roofline import measure_roofline

CORES = (2, 8, 32, 64, 128, 192)
#: Cores that share a node of memory, and a socket.
NODE = 64

#: Microseconds of a step that is left to one thread: ``kShort`` in ``kernels/runtime/parallel.h``.
_SHORT = 8.0
#: What sharing is taken to cost there, ``kTogether``, in microseconds; and what it was before.
_CALL, _EACH, _EACH_BEFORE = 0.5, 0.03, 0.5
#: What one item of a step is, roughly: so many pixels of so many channels.
_PIXELS, _CHANNELS = 12, 32
_SIZE = 224
_WARM, _TIMED = 5, 5  # runs a turn: threads that slept, and caches, take a few


@dataclasses.dataclass(frozen=True)
class Machine:
    """What sharing costs, and how fast weights come.

    Attributes:
        line: nanoseconds of a cache line's way from core to core.
        l2: bytes that a core keeps to itself.
        gb_per_s: how fast one thread reads what is beyond; two together.
        side_by_side: the speed of each of two threads that multiply, over that of one alone: less
            than 1 where the two CPUs share a core, or its clock.
    """

    line: float
    l2: int
    gb_per_s: tuple[float, float]
    side_by_side: float

    def reading(self, size: int, threads: int) -> float:
        """Microseconds for so many bytes."""
        one, two = self.gb_per_s
        return size / (one * max(1.0, two / one) ** math.log2(threads)) / 1e3


@dataclasses.dataclass(frozen=True)
class Design:
    """How work is shared.

    Attributes:
        name: in the table.
        loop: the time of a loop, as ``loop_simulation`` has it.
        shares: how many threads work of so many microseconds deserves.
        on_all_nodes: whether weights are read from every node.
    """

    name: str
    loop: Callable[[int, float, Costs], float]
    shares: Callable[[float], float]
    on_all_nodes: bool

    def loop_us(self, threads: int, machine: Machine) -> float:
        """Microseconds of an empty loop."""
        return _loop_us(self.loop, threads, machine.line)

    def reading(self, size: int, threads: int, machine: Machine) -> float:
        """Microseconds for so many bytes of weights."""
        return machine.reading(size, threads if self.on_all_nodes else min(threads, NODE))


@functools.cache
def _loop_us(loop: Callable[[int, float, Costs], float], threads: int, line: float) -> float:
    share = 20_000.0
    return (loop(threads, share, Costs(line=line)) - share) / 1e3 if threads > 1 else 0.0


def _by_doubling(us: float) -> float:
    call = _CALL / math.log(2)
    return (math.sqrt(call * call + 4 * _EACH * us) - call) / (2 * _EACH)


BEFORE = Design("before", one_word, lambda us: math.sqrt(us / _EACH_BEFORE), on_all_nodes=False)
NOW = Design("now", by_groups, _by_doubling, on_all_nodes=True)


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


@dataclasses.dataclass(frozen=True)
class Network:
    """What is measured of one, for one size of batch.

    Attributes:
        steps: those of a run.
        between: microseconds of a run outside of them.
        batch: images of a run.
    """

    steps: Sequence[Step]
    between: float
    batch: int

    def on(self, cores: int, machine: Machine, design: Design) -> float:
        """Microseconds of a run on so many cores."""
        weights = sum(step.weights for step in self.steps)
        streamed, by_one = weights > cores * machine.l2, weights > machine.l2
        if self.batch > 1 and cores > 1:
            return self.between + self._image_by_image(cores, weights, machine, design)
        times = [
            self._shared(step, cores, machine, design, streamed, by_one) for step in self.steps
        ]
        return sum(times) + self.between

    def _image_by_image(self, cores: int, weights: int, machine: Machine, design: Design) -> float:
        threads = min(cores, self.batch)
        most = math.ceil(self.batch / threads) / self.batch
        again = 0.0
        if weights > machine.l2:  # by each thread for each of its images
            images = math.ceil(self.batch / threads)
            again = design.reading(weights * threads * images, threads, machine)
        computing = sum(step.us for step in self.steps) * most / machine.side_by_side
        return max(computing, again) + design.loop_us(threads, machine)

    @staticmethod
    def _shared(
        step: Step, cores: int, machine: Machine, design: Design, streamed: bool, by_one: bool
    ) -> float:
        threads = min(cores, step.items, max(1, int(design.shares(step.us))))
        reading = machine.reading(step.weights, 1) if by_one else 0.0
        # Some is read while something is multiplied.
        computing = max(step.us - reading, step.us / 2)
        if threads < 2 or step.us < _SHORT:
            return computing + (machine.reading(step.weights, 1) if streamed else 0.0)
        most = math.ceil(step.items / threads) / step.items
        again = design.reading(step.weights, threads, machine) if streamed else 0.0
        return (
            computing * most / machine.side_by_side
            + min(again, step.us / threads)
            + design.loop_us(threads, machine)
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


def this_machine() -> Machine:
    """What is measured once."""
    line = measured_line()
    speeds = []
    one, two = (measure_roofline(threads) for threads in (1, 2))
    for levels in (one.levels, two.levels):
        speeds.append(next((level for level in levels if level.name == "L3"), levels[-1]).gb_per_s)
    side_by_side = min(1.0, two.gops / one.gops / 2)
    return Machine(line, cpu().l2 or 1 << 20, (speeds[0], speeds[1]), side_by_side)


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


def measured_network(name: str, batch: int, rounds: int) -> tuple[Network, float]:
    """What the model takes of a network, and the speedup of two threads as measured."""
    model = torchvision_model(name)
    x = torch.randn(batch, 3, _SIZE, _SIZE).contiguous(memory_format=torch.channels_last)
    compiled = x86quant.compile(converted(model, x[:1]), (x[:1],))
    one = profile(compiled, (x,), runs=rounds, threads=1)
    with torch.no_grad():
        two = measured_speedup(lambda: compiled(x), rounds)
    return Network(steps_of(one), one.between_us, batch), two


def rows(name: str, network: Network, two: float, machine: Machine) -> str:
    """A line of the table for each design."""
    lines = []
    for design in (BEFORE, NOW):
        one = network.on(1, machine, design)
        speedups = "".join(f"{one / network.on(n, machine, design):>8.2f}" for n in CORES)
        last = f"{two:>11.2f}" if design is NOW else ""
        title = f"{name}, batch {network.batch}" if design is BEFORE else ""
        lines.append(f"{title:<30}{design.name:<8}{one / 1e3:>9.2f}{speedups}{last}")
    return "\n".join(lines)


def cut(name: str, network: Network, machine: Machine, cores: int) -> str:
    """What processes of so many threads do together, one image at a time each."""
    found = []
    for threads in (1, 2, 4, 8, 16, 32, 64):
        if threads > cores:
            break
        ms = network.on(threads, machine, NOW) / 1e3
        # A process has its share of what all read.
        found.append(
            f"{cores // threads}x{threads}: {cores // threads * 1e3 / ms:.0f}/s {ms:.2f} ms"
        )
    return f"{name:<22}" + "   ".join(found)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # stock PyTorch's own
    print_environment()
    machine = this_machine()
    print(
        f"a line's way from core to core: {machine.line:.0f} ns; beyond L2 one thread reads "
        f"{machine.gb_per_s[0]:.0f} GB/s, two {machine.gb_per_s[1]:.0f}; "
        f"beside another each multiplies at {machine.side_by_side:.0%} of its speed\n"
    )
    cores = "".join(f"{n:>8}" for n in CORES)
    print(f"{'speedup, predicted; cores':<38}{'ms on 1':>9}{cores}{'measured 2':>11}")
    singles = {}
    for name in options.networks:
        for batch in options.batches:
            network, two = measured_network(name, batch, max(3, options.rounds // batch))
            print(rows(name, network, two, machine), flush=True)
            if batch == 1:
                singles[name] = network
    if singles:
        print(f"\n{NODE} cores cut among processes, processes x threads, image by image")
        for name, network in singles.items():
            print(cut(name, network, machine, NODE))


if __name__ == "__main__":
    main()
