"""How long ``quantize`` itself takes: small random programs and networks of torchvision.

    python -m benchmarks.quantize_time --programs 40 --networks resnet18 resnet50

Times are CPU time of this process on one thread: other work on the machine disturbs them least.
The programs are those of ``benchmarks.fuzz_programs``, without the speed check; the networks get
four images, and everything that ``quantize`` does by itself. ``--profile`` prints where it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import time
import warnings
from collections.abc import Callable

import torch

import x86quant
from benchmarks.environment import print_environment
from benchmarks.fuzz.drawing import write
from benchmarks.fuzz.judging import quantized
from benchmarks.fuzz.programs import Program
from benchmarks.networks import images, network_for_images
from x86quant.errors import X86QuantError


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


def of_network(name: str) -> float:
    """CPU seconds of quantizing one network of torchvision with four images."""
    model = network_for_images(name)
    calls = [images(1, 224, seed) for seed in range(4)]
    return seconds(lambda: x86quant.quantize(model, calls, progress=False))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--networks", nargs="*", default=["resnet18", "resnet50"])
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
        print(f"{name}: {of_network(name):.2f} s", flush=True)
        profiler.disable()
    if options.profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(120)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
