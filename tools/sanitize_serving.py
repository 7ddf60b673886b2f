"""Loads and runs program files under the sanitizers.

    python -m tools.sanitize_serving --seeds 500 --rounds 20

Exports a small network, a small recommender and a small recurrent network, and with ``--kinds``
writes a file for each kind of step. Under AddressSanitizer and UBSan they are loaded and run with
random changes. The networks run under ThreadSanitizer as they are by several threads at once (and
loops without them by teams of up to 64), and without a sanitizer with memory refused at each
allocation in turn. AMX's tiles are emulated, so that what they touch is seen too. Needs a checkout
and a C++ compiler with its sanitizer libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import x86quant
from tests.native.build import DEFAULT_DIRECTORY, SANITIZERS, build, compiled, without_torch
from tests.step_files import STEPS, placed, step_file
from x86quant.cpp_library import cpp_paths
from x86quant.hardware.isa import LEVELS
from x86quant.kernels.native import toolchain

_ROOT = Path(__file__).resolve().parents[1]
SERVING = _ROOT / "kernels" / "serving"
FUZZ = _ROOT / "tests" / "serving" / "fuzz"
#: Whose tiles are emulated: what real ones touch no sanitizer sees. Kernels of levels that the CPU
#: lacks are never run here, and under AddressSanitizer others have compiled them already.
_HAS_TILES = "amx_int8" in x86quant.cpu().features
#: What the programs end with that are told no file.
_NO_FILE = 2


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


class Recommender(nn.Module):
    """Lookups and their interaction."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """One number for each sample."""
        first = self.bottom(dense)
        rows = [table(ids[:, i : i + 1]) for i, table in enumerate(self.tables)]
        every = torch.stack([first, *rows], 1)
        row, column = torch.tril_indices(4, 4, -1)
        products = torch.bmm(every, every.transpose(1, 2))[:, row, column]
        out: torch.Tensor = self.top(torch.cat([first, products], 1))
        return out


class Tagger(nn.Module):
    """An LSTM that goes on from states, projected, and a GRU in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, proj_size=5, batch_first=True)
        self.gru = nn.GRU(5, 6, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Three numbers for each step, and the last cells."""
        out, (_, c) = self.lstm(x, (h, c))
        return self.head(self.gru(out)[0]), c


def exported(folder: Path) -> list[Path]:
    """Program files with several plans, of the network one in parts of a batch."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    dense, ids = torch.randn(64, 4), torch.randint(0, 20, (64, 3))
    steps = torch.randn(3, 5, 4), torch.randn(1, 3, 5), torch.randn(1, 3, 8)
    samples: list[tuple[nn.Module, tuple[torch.Tensor, ...], list[tuple[torch.Tensor, ...]]]] = [
        (Variety(), (x,), [(x[:1],), (torch.zeros(4, 3, 16, 16),)]),
        (Recommender(), (dense, ids), [(dense, ids), (dense[:2], ids[:2])]),
        (Tagger(), steps, [steps]),
    ]
    paths = []
    for model, batch, calls in samples:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = x86quant.quantize(
                model.eval(), [batch], mode="static", speed_check=False, progress=False
            )
        paths.append(folder / f"fuzzed_{type(model).__name__.lower()}.xq")
        x86quant.export_program(module, paths[-1], calls)
    return paths


def of_each_kind(folder: Path) -> list[Path]:
    """A program file for each kind of step, and each of its forms."""
    files = {
        form: folder / f"fuzzed_{form.replace(', ', '_').replace(' ', '_')}.xq" for form in STEPS
    }
    return [step_file(file, form, placed(form)) for form, file in files.items()]


def of_library(program: str, folder: Path) -> Path:
    """``fuzz/<program>.cpp`` with the installed library, which finds this program's functions."""
    paths, target = cpp_paths(), folder / f"{program}-serving"
    source = FUZZ / f"{program}.cpp"
    flags = [toolchain.STANDARD, "-rdynamic", "-pthread", "-I", str(paths.include)]
    link = [str(paths.library), f"-Wl,-rpath,{paths.library.parent}", "-ldl", "-o", str(target)]
    compiler = shlex.split(toolchain.compiler())
    subprocess.run([*compiler, *flags, str(source), *link], check=True)
    return target


def built(program: str, sanitizer: str, folder: Path) -> Path:
    """``fuzz/<program>.cpp`` with all it runs, compiled with the ``sanitizer``."""
    flags = [*toolchain.flags(), *SANITIZERS[sanitizer]]
    own = [FUZZ / f"{program}.cpp", *sorted(SERVING.glob("*.cpp"))]
    objects = compiled(own, folder, [*flags, "-I", str(SERVING / "include")])
    objects += [
        *compiled(without_torch(), folder, flags),
        build(folder, sanitizer=sanitizer, emulate=sanitizer == "address" or _HAS_TILES),
    ]
    target = folder / f"{program}-serving"
    link = [*map(str, objects), f"-Wl,-rpath,{folder}", "-pthread", "-o", str(target)]
    subprocess.run([*shlex.split(toolchain.compiler()), *flags, *link], check=True)
    return target


def starts(target: Path) -> list[str] | None:
    """The words that start ``target``; None if none do.

    ThreadSanitizer wants its memory where newer kernels may have put something else.
    """
    for words in ([str(target)], ["setarch", "--addr-no-randomize", str(target)]):
        with contextlib.suppress(OSError):
            ended = subprocess.run(words, check=False, stderr=subprocess.DEVNULL)
            if ended.returncode == _NO_FILE:
                return words
    return None


def main() -> int:
    """Build, export, run, and return whether anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="changed files of each")
    parser.add_argument("--kinds", action="store_true", help="files of each kind of step, too")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20, help="runs by each of the threads")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    arguments = parser.parse_args()
    last = arguments.first + arguments.seeds
    here = [name for name, level in LEVELS.items() if level.features <= x86quant.cpu().features]
    arguments.directory.mkdir(parents=True, exist_ok=True)
    networks, kinds = exported(arguments.directory), of_each_kind(arguments.directory)
    failed = 0
    for program, sanitizer, numbers in (
        ("fuzz", "address", [arguments.first, last]),
        ("race", "thread", [arguments.rounds]),
        ("refused_memory", None, []),
    ):
        folder = arguments.directory
        target = built(program, sanitizer, folder) if sanitizer else of_library(program, folder)
        start = starts(target)
        if start is None:
            print(f"{program}: NOT RUN: programs with the {sanitizer} sanitizer do not start here")
            failed |= sanitizer != "thread"
            continue
        tried = dict.fromkeys(networks, numbers)
        if program == "fuzz" and arguments.kinds:  # which are many, and each file is one step
            few = arguments.first + max(1, arguments.seeds // 10)
            tried |= {file: [arguments.first, few] for file in kinds}
        for file, given in tried.items():
            print(f"{program}, {file.stem}: ", end="", flush=True)
            failed |= _ran([*start, str(file), *map(str, given), *here])
    folder = arguments.directory
    team = built("team", "thread", folder)
    if (start := starts(team)) is not None:
        failed |= _ran([*start, "300"])
    return failed


def _ran(command: list[str]) -> int:
    options = {
        "ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=1024:detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    }
    return subprocess.run(command, check=False, env={**os.environ, **options}).returncode


if __name__ == "__main__":
    sys.exit(main())
