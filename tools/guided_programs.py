"""Loads program files that libFuzzer chooses by the code that was run, and runs what is loaded.

    apt-get install clang
    python -m tools.guided_programs --count 100000

It begins with three networks and with a file for each form of every kind of step. What loads and
proves is under AddressSanitizer and UBSan, and tells libFuzzer which of its code was run; the
kernels are as they are, their own fuzz is ``tests.native.sanitize``. Needs a checkout and clang.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.native.build import DEFAULT_DIRECTORY, build, compiled, without_torch
from tools.sanitize_serving import FUZZ, SERVING, exported, of_each_kind
from x86quant.kernels.native import toolchain

#: ``vptr`` would need the type information of the kernels' library.
SANITIZERS = [
    "-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all",
    "-fsanitize=fuzzer-no-link,address,undefined", "-fno-sanitize=vptr",
]  # fmt: skip


def built(folder: Path) -> Path:
    """The program, compiled with clang."""
    kernels = build(folder)  # by the usual compiler
    os.environ["CXX"] = "clang++"
    flags = [*toolchain.flags(), *SANITIZERS, "-I", str(SERVING / "include")]
    sources = [FUZZ / "guided.cpp", *sorted(SERVING.glob("*.cpp")), *without_torch()]
    objects = [*compiled(sources, folder, flags), kernels]
    target = folder / "guided-serving"
    link = ["-fsanitize=fuzzer", *map(str, objects), f"-Wl,-rpath,{folder}", "-pthread"]
    subprocess.run(["clang++", *flags, *link, "-o", str(target)], check=True)
    return target


def main() -> int:
    """Build, run, and return what libFuzzer ends with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100_000, help="files to load")
    parser.add_argument("--isa", help="the level; by default the best of this CPU")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    options = parser.parse_args()
    if shutil.which("clang++") is None:
        parser.error("clang++ is missing: apt-get install clang")
    options.directory.mkdir(parents=True, exist_ok=True)
    target = built(options.directory)
    with tempfile.TemporaryDirectory() as folder:
        samples, found = Path(folder, "samples"), Path(folder, "found")
        for made in (samples, found):
            made.mkdir()
        files = [*exported(samples), *of_each_kind(samples)]
        largest = max(file.stat().st_size for file in files)
        command = [str(target), f"-runs={options.count}", f"-max_len={2 * largest}", "-timeout=20"]
        command += [
            "-rss_limit_mb=4096",
            f"-artifact_prefix={options.directory}/",
            "-verbosity=0",
            "-print_funcs=0",
        ]
        isa = {} if options.isa is None else {"FUZZ_ISA": options.isa}
        asan = {"ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=1024"}
        ended = subprocess.run(
            [*command, str(found), str(samples)], env={**os.environ, **asan, **isa}, check=False
        )
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
