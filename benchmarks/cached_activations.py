"""What is left to win by keeping activations in a core's second-level cache: an upper bound.

    python -m benchmarks.cached_activations [--networks resnet50 mobilenet_v2] [--rounds 20]

On one thread. Cap the level by ``X86QUANT_ISA``.

- *beyond*: the share of the time, one image, of steps whose inputs and outputs together exceed L2.
- *bands*: the steps from the first to the last such one, run for bands of an image's rows from end
  to end, band after band, against the same steps as planned. Bands are images of so many rows: what
  overlaps between two of them is neither computed nor copied, so nothing that runs in bands can be
  quicker. Each with the share of the whole run that it saves.
- *parts*: a batch of so many images, microseconds an image, by parts of 1, 2, 4… images, each
  through the whole network; then as planned, in stages; and each step by the size that is best for
  it, as if nothing were lost between stages. Both with the time of the best single size over it.

Times are minima, of each step by itself or of a run.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import x86quant
from benchmarks.artifacts import converted
from benchmarks.environment import print_environment
from benchmarks.networks import torchvision_model
from x86quant.hardware.cpu import cpu
from x86quant.runtime import Segment
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import BatchStage, Plan, Step
from x86quant.runtime.planner import draft_segment, new_program
from x86quant.runtime.stages import plan_stages

_SIZE = 224
#: Rows of a band: networks halve them up to five times.
_BANDS = (112, 56, 32)
_WARM = 3


def images(batch: int, rows: int = _SIZE) -> torch.Tensor:
    """Noise as networks take it."""
    x = torch.randn(batch, 3, rows, _SIZE)
    return x.contiguous(memory_format=torch.channels_last)


def prefix(segment: Segment, x: torch.Tensor, last: int, times: int) -> Any:
    """A program of the steps up to ``last`` on ``x``, all of them so many times."""
    packs = Packs(segment.graph_module)
    draft = draft_segment(segment.graph_module, [x], packs, 1)
    results = draft.results()
    program = new_program(draft, draft.lay_out(), [x], results)
    for step in draft.native_steps[: last + 1] * times:
        packs.programs.add(program, step)
    return program


def wall(run: Callable[[], object]) -> float:
    """Microseconds."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def in_turn(
    programs: Sequence[tuple[Any, torch.Tensor]], rounds: int, between: Callable[[], object]
) -> list[float]:
    """Least microseconds of each program, the caches as ``between`` leaves them."""
    taken: list[list[float]] = [[] for _ in programs]
    for turn in range(-_WARM, rounds):
        for (program, x), times in zip(programs, taken, strict=True):
            between()
            one = wall(lambda p=program, x=x: p.run([x]))
            if turn >= 0:
                times.append(one)
    return [*map(min, taken)]


def step_times(programs: Sequence[tuple[Any, torch.Tensor]], rounds: int) -> list[list[float]]:
    """Least microseconds of every step of each program, in turn."""
    taken: list[list[list[float]]] = [[] for _ in programs]
    for turn in range(-_WARM, rounds):
        for (program, x), runs in zip(programs, taken, strict=True):
            times = program.run_timed([x])[1].tolist()
            if turn >= 0:
                runs.append(times)
    return [[min(step) for step in zip(*runs, strict=True)] for runs in taken]


def _beyond(step: Step, cache: int) -> bool:
    return sum(value.nbytes for value in (*step.inputs, step.output, *step.others)) > cache


def print_bands(segment: Segment, rounds: int) -> None:
    """What bands of rows could save of one image."""
    x = images(1)
    plan = segment.plan([x])
    cache = cpu().l2 or 1 << 20
    big = [i for i, step in enumerate(plan.steps) if _beyond(step, cache)]
    (times,) = step_times([(plan.program, x)], rounds)
    total = sum(times)
    share = sum(times[i] for i in big) / total
    print(f"  beyond: {len(big)} of {len(times)} steps, {share:.0%} of {total:.0f} µs")
    if not big:
        return
    programs = [(prefix(segment, x, big[-1], 1), x)]
    for rows in _BANDS:
        band = images(1, rows)
        programs.append((prefix(segment, band, big[-1], _SIZE // rows), band))
    whole, *bands = in_turn(programs, rounds, lambda: plan.program.run([x]))
    each = ", ".join(
        f"of {rows} rows {us:.0f} ({(whole - us) / total:+.1%})"
        for rows, us in zip(_BANDS, bands, strict=True)
    )
    print(f"  bands: steps 1 to {big[-1] + 1} {whole:.0f} µs, {each}", flush=True)


def print_parts(segment: Segment, batch: int, rounds: int) -> None:
    """What parts of several sizes save of a batch, and could save."""
    x = images(batch)
    planned = segment.plan([x])
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if batch % size == 0]
    plans = [_in_parts(segment, x, size) for size in sizes]
    *times, as_planned = step_times([(plan.program, x) for plan in (*plans, planned)], rounds)
    totals = [sum(one) / batch for one in times]
    each = ", ".join(f"{size} {us:.0f}" for size, us in zip(sizes, totals, strict=True))
    stages = ", ".join(f"of {one.images} up to step {one.end}" for one in planned.stages)
    now, best = (sum(one) / batch for one in (as_planned, map(min, zip(*times, strict=True))))
    print(
        f"  parts: of {each}; {stages or 'whole'} {now:.0f} ({min(totals) / now - 1:+.1%}); "
        f"each step by its best size {best:.0f} ({min(totals) / best - 1:+.1%})",
        flush=True,
    )


def _in_parts(segment: Segment, x: torch.Tensor, size: int) -> Plan:
    stage = BatchStage(0, size, len(x) // size)
    plan = plan_stages(segment.graph_module, [x], Packs(segment.graph_module), [stage])
    assert plan is not None
    return plan


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    networks = ["resnet50", "mobilenet_v2", "efficientnet_b0"]
    parser.add_argument("--networks", nargs="+", default=networks)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # stock PyTorch's own
    torch.set_num_threads(1)
    print_environment()
    with torch.no_grad():
        for name in options.networks:
            x = images(1)
            compiled = x86quant.compile(converted(torchvision_model(name), x), (x,))
            print(name)
            for segment in compiled.segments:
                print_bands(segment, options.rounds)
                print_parts(segment, options.batch, options.rounds)


if __name__ == "__main__":
    main()
