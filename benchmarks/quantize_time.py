"""How long ``quantize`` itself takes: small random programs and networks of torchvision.

    python -m benchmarks.quantize_time --programs 40 --networks resnet18 resnet50
    python -m benchmarks.quantize_time --programs 0 --networks --trained gru waves

Times are CPU time of this process on one thread: other work on the machine disturbs them least.
The programs are those of ``benchmarks.fuzz_programs``, without the speed check; the networks get
four images, and everything that ``quantize`` does by itself: for each the seconds of its stages,
and what is left between them. ``--profile`` prints the dearest functions. Trained networks are
those of ``benchmarks.trained``, each beside NNCF, whose time includes reading and compiling by
OpenVINO, as ours includes tracing and packing.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import x86quant
from benchmarks.environment import print_environment
from benchmarks.fuzz.drawing import write
from benchmarks.fuzz.judging import quantized
from benchmarks.fuzz.programs import Program
from benchmarks.networks import images, network_for_images
from benchmarks.trained.__main__ import NETWORKS, silence
from benchmarks.trained.peers import WAYS
from x86quant.errors import X86QuantError
from x86quant.quantization import outcome, preparing

#: What is printed of a function that ``quantize`` calls itself, one after another.
_STAGES = {
    (preparing, "copied"): "copy",
    (preparing, "_check_runs"): "first run",
    (preparing, "find_parts"): "trace and prove",
    (preparing, "calibrated_parts"): "equalize, calibrate",
    (preparing, "_calibrate_further"): "calibrate further",
    (preparing, "take_steps"): "weights, biases",
    (preparing, "_not_buildable"): "convert and lower",
    (outcome, "that_runs"): "plan, pack, run",
    (outcome, "judged"): "compare",
    (outcome, "without_costly_steps"): "costly steps",
    (outcome, "good_enough"): "bad layers",
    (outcome, "no_slower"): "speed check",
}


def seconds(work: Callable[[], object]) -> float:
    """CPU time of ``work``, which x86quant may refuse."""
    start = time.process_time()
    with contextlib.suppress(X86QuantError):
        work()
    return time.process_time() - start


def of_program(program: Program) -> float:
    """CPU seconds of quantizing one random program."""
    model = program.build()
    return seconds(lambda: quantized(model, program))


def of_network(name: str) -> tuple[float, dict[str, float]]:
    """CPU seconds of quantizing one network of torchvision with four images, and of its stages."""
    model = network_for_images(name)
    calls = [images(1, 224, seed) for seed in range(4)]
    with stages_timed() as stages:
        taken = seconds(lambda: x86quant.quantize(model, calls, progress=False))
    return taken, stages


def beside_nncf(
    name: str, profiler: cProfile.Profile | None = None
) -> tuple[float, float, dict[str, float]]:
    """CPU seconds of quantizing a trained network, ours and NNCF's, and of our stages."""
    with silence():
        network = NETWORKS[name]()

        def made(way: str) -> float:
            return seconds(lambda: WAYS[way](network)(network.test[0]))

        with profiler or contextlib.nullcontext(), stages_timed() as stages:
            own = made("x86quant")
        return own, made("nncf"), stages


@contextlib.contextmanager
def stages_timed() -> Iterator[dict[str, float]]:
    """A block in which the CPU seconds of each stage are added up; one within another is not."""
    found = dict.fromkeys(_STAGES.values(), 0.0)
    inside = False

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*args, **kwargs)
            inside = True
            start = time.process_time()
            try:
                result = function(*args, **kwargs)
                return iter(list(result)) if isinstance(result, Iterator) else result
            finally:
                found[name] += time.process_time() - start
                inside = False

        return run

    with contextlib.ExitStack() as stack:
        for (module, function), name in _STAGES.items():
            replaced = timed(name, getattr(module, function))
            stack.enter_context(mock.patch.object(module, function, replaced))
        yield found


def print_stages(taken: float, stages: dict[str, float]) -> None:
    """A line a stage, and one for what is between them."""
    for stage, part in {**stages, "the rest": taken - sum(stages.values())}.items():
        print(f"  {stage:<20}{part:>6.2f}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--networks", nargs="*", default=["resnet18", "resnet50"])
    parser.add_argument("--trained", nargs="*", default=[], choices=list(NETWORKS))
    parser.add_argument("--profile", action="store_true", help="print the dearest functions")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print_environment()
    profiler = cProfile.Profile()
    if options.programs:
        of_program(write(options.programs))  # what torch imports and caches at its first use
        programs = [write(seed) for seed in range(options.programs)]
        if options.profile:
            profiler.enable()
        times = [of_program(program) for program in programs]
        profiler.disable()
        print(
            f"{len(times)} programs: mean {statistics.mean(times):.3f} s, "
            f"median {statistics.median(times):.3f} s, most {max(times):.2f} s"
        )
    for name in options.networks:
        if options.profile:
            profiler.enable()
        taken, stages = of_network(name)
        profiler.disable()
        print(f"{name}: {taken:.2f} s")
        print_stages(taken, stages)
    if options.trained:
        beside_nncf(options.trained[0])  # what both import and cache at their first use
    for name in options.trained:
        own, other, stages = beside_nncf(name, profiler if options.profile else None)
        print(f"{name}: {own:.1f} s, NNCF {other:.1f} s, ratio {own / other:.2f}")
        print_stages(own, stages)
    if options.profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(120)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
