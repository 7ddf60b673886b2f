"""Fuzzes the loader of program files under AddressSanitizer and UBSan.

    python -m tools.sanitize_serving --seeds 500

Exports a small network, then loads and runs it with random changes. Needs a checkout and a C++
compiler with its sanitizer libraries.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import x86quant
from x86quant.hardware.isa import LEVELS
from x86quant.kernels.native import toolchain
from x86quant.kernels.native.build import DEFAULT_DIRECTORY, SANITIZE_FLAGS, build

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
SERVING = KERNELS / "serving"
RUNTIME = (
    "conv_kernel native_conv native_cpu program reach scratch step strided_copy"  # see setup.py
)


class Variety(nn.Module):
    """Many kinds of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU())
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.point = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Hardswish())
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 16, 1), nn.Sigmoid())
        self.pool, self.mean = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.transposed = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Linear(40, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An image and a vector."""
        x = self.stem(x)
        y = self.point(self.depthwise(x)) + self.grouped(x)
        y = y * self.gate(y)
        z = torch.cat([self.up(self.pool(y)), x, self.transposed(self.mean(y))], 1)
        return z, self.head(z.mean((2, 3)))


def exported(folder: Path) -> Path:
    """A program file with two plans, one of them in parts of a batch."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = x86quant.quantize(Variety().eval(), [x], speed_check=False, progress=False)
    path = folder / "fuzzed.xq"
    x86quant.export_program(module, path, [x[:1], torch.zeros(4, 3, 16, 16)])
    return path


def fuzzer(folder: Path) -> Path:
    """The fuzzer with all it runs, compiled with the sanitizers."""
    library = build(folder, sanitize=True)
    flags = [*toolchain.flags(), *SANITIZE_FLAGS, "-I", str(SERVING / "include")]
    sources = [*SERVING.glob("*.cpp"), *(KERNELS / "steps").glob("*.cpp")]
    sources += [SERVING / "fuzz" / "fuzz.cpp"]
    sources += [KERNELS / "runtime" / f"{name}.cpp" for name in RUNTIME.split()]
    objects = [folder / f"serving-{source.parent.name}-{source.stem}.o" for source in sources]
    compiler = shlex.split(toolchain.compiler())

    def compiled(source: Path, to: Path) -> None:
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(to)], check=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiled, sources, objects))
    target = folder / "fuzz-serving"
    link = [*map(str, objects), str(library), f"-Wl,-rpath,{folder}", "-pthread", "-o", str(target)]
    subprocess.run([*compiler, *flags, *link], check=True)
    return target


def main() -> int:
    """Build, export, run, and return the fuzzer's status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    arguments = parser.parse_args()
    target, file = fuzzer(arguments.directory), exported(arguments.directory)
    last = arguments.first + arguments.seeds
    here = [name for name, level in LEVELS.items() if level.features <= x86quant.cpu().features]
    options = "allocator_may_return_null=1:max_allocation_size_mb=1024:detect_leaks=0"
    command = [str(target), str(file), str(arguments.first), str(last), *here]
    environment = {**os.environ, "ASAN_OPTIONS": options}
    return subprocess.run(command, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
