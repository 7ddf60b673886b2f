"""What a call costs in C++ and in Python: the same network, inputs and threads, in turn.

    python -m benchmarks.cpp_serving --models resnet18 mobilenet_v2 --rounds 40

The C++ call is timed by C++ itself, in a process of its own that the rounds alternate with, so that
neither pays for the other's caller. Weights are random. Prints milliseconds and ratios.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import tempfile
import warnings
from pathlib import Path
from time import perf_counter

import torch

import x86quant
from benchmarks.networks import NETWORKS, torchvision_model
from x86quant.hardware.cpu import cpu

#: Times as many calls as it is told on its standard input, and says what each took.
TIMER = r"""
#include <x86quant/runtime.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
int main(int, char** argv) try {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const x86quant::Program program(argv[1], std::atoi(argv[2]));
  x86quant_tensor in = program.input(0), out = program.output(0);
  std::vector<float> x(in.bytes / 4, 0.5f), y(out.bytes / 4);
  in.data = x.data(), out.data = y.data();
  if (x86quant_run(program.get(), &in, 1, &out, 1) != X86QUANT_OK) return 1;
  std::printf("%.9f\n", std::chrono::duration<double>(Clock::now() - start).count());
  std::fflush(stdout);
  for (int calls; std::scanf("%d", &calls) == 1;) {
    const auto before = Clock::now();
    for (int i = 0; i < calls; ++i) x86quant_run(program.get(), &in, 1, &out, 1);
    std::printf("%.9f\n", std::chrono::duration<double>(Clock::now() - before).count() / calls);
    std::fflush(stdout);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
"""


def compiled_timer(folder: Path) -> Path:
    """The program that times calls."""
    source, target = folder / "timer.cpp", folder / "timer"
    source.write_text(TIMER)
    paths = x86quant.cpp_paths()
    flags = [*shlex.split(paths.cflags), "-O2", str(source), *shlex.split(paths.libs)]
    subprocess.run(["c++", *flags, "-o", str(target)], check=True)
    return target


def measure(name: str, batch: int, rounds: int, calls: int, folder: Path, timer: Path) -> str:
    """One row of the table."""
    x = torch.full((batch, 3, 224, 224), 0.5)
    float_model = torchvision_model(name, 224)
    calibration = [torch.randn(2, 3, 224, 224)]
    model = x86quant.quantize(float_model, calibration, speed_check=False, progress=False)
    file = folder / f"{name}.xq"
    x86quant.export_program(model, file, [x])
    threads = torch.get_num_threads()
    model(x)
    command = [str(timer), str(file), str(threads)]
    times: dict[str, list[float]] = {"C++": [], "Python": []}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as served:
        assert served.stdin is not None
        assert served.stdout is not None
        loaded = float(served.stdout.readline())
        for _ in range(rounds):
            served.stdin.write(f"{calls}\n")
            served.stdin.flush()
            times["C++"].append(float(served.stdout.readline()))
            start = perf_counter()
            for _ in range(calls):
                model(x)
            times["Python"].append((perf_counter() - start) / calls)
        served.stdin.close()
    least = {who: min(taken) * 1e3 for who, taken in times.items()}
    usual = {who: statistics.median(taken) * 1e3 for who, taken in times.items()}
    return (
        f"{name:<20} {batch:>5} {least['C++']:>9.3f} {least['Python']:>9.3f} "
        f"{least['C++'] / least['Python']:>7.3f} {usual['C++'] / usual['Python']:>7.3f} "
        f"{loaded:>9.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["resnet18", "mobilenet_v2"], choices=NETWORKS
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=5, help="calls a round")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    print(f"{cpu().name}, {cpu().isa}, {options.threads} threads; milliseconds, least of rounds")
    print(
        f"{'':<20} {'batch':>5} {'C++':>9} {'Python':>9} {'ratio':>7} {'median':>7} {'load s':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        timer = compiled_timer(Path(folder))
        for name in options.models:
            for batch in options.batch:
                row = measure(name, batch, options.rounds, options.calls, Path(folder), timer)
                print(row, flush=True)


if __name__ == "__main__":
    main()
