"""Fuzzes the native kernels under AddressSanitizer and UBSan.

    python -m tests.native.sanitize --seeds 300

    python -m tests.native.sanitize --seeds 300 --emulate
    python -m tests.native.sanitize --seeds 20000 --emulate --plain   # comparisons alone, fast
    python -m tests.native.sanitize --seeds 20000 --emulate --plain --family groups

Needs a C++ compiler with its sanitizer libraries. ISAs that this CPU lacks are left out, or
emulated: AVX-VNNI on CPUs with AVX2, AMX on those with AVX512-VNNI. What emulated tiles touch is
checked too.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from tests.native.build import DEFAULT_DIRECTORY, EMULATED_ON, SANITIZERS, build
from x86quant.hardware.cpu import cpu
from x86quant.kernels.native import toolchain

HERE = Path(__file__).resolve().parent

# What each number of xq_isa needs beyond the number before it.
FEATURES = {1: "avx2", 2: "avx_vnni", 3: "avx512", 4: "avx512_vnni", 5: "amx_int8"}

#: What is fuzzed, by the names that ``fuzz/fuzz.cpp`` gives.
FAMILIES = (
    "conv", "op", "channel_op", "linear", "lookup", "interaction", "gates", "rows", "attention",
    "groups", "sums",
)  # fmt: skip


def fuzzer(
    directory: Path, sanitizer: str | None, *, emulate: bool, family: str = "all"
) -> list[str]:
    """The program that fuzzes a family of kernels, built, and the ISAs it can.

    Seeds go behind the first of these words.
    """
    library = build(directory, sanitizer=sanitizer, emulate=emulate)
    program = directory / "fuzz"
    source = HERE / "fuzz" / "fuzz.cpp"
    flags = [
        toolchain.STANDARD,
        "-Wall",
        "-Wextra",
        *(SANITIZERS[sanitizer] if sanitizer else ["-O1"]),
        f"-Wl,-rpath,{directory}",
    ]
    subprocess.run(
        [*shlex.split(toolchain.compiler()), *flags, str(source), str(library), "-o", str(program)],
        check=True,
    )
    stands_for = EMULATED_ON if emulate else {}
    needs = {isa: stands_for.get(needed, needed) for isa, needed in FEATURES.items()}
    isas = [str(isa) for isa, needed in needs.items() if needed in cpu().features]
    return [str(program), family, *isas]


def main() -> int:
    """Build both, run, and return the fuzzer's status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--emulate", action="store_true", help="levels that this CPU lacks, too")
    parser.add_argument("--family", choices=("all", *FAMILIES), default="all")
    parser.add_argument("--plain", action="store_true", help="without the sanitizers")
    arguments = parser.parse_args()
    sanitizer = None if arguments.plain else "address"
    last = arguments.first + arguments.seeds
    command = fuzzer(
        arguments.directory, sanitizer, emulate=arguments.emulate, family=arguments.family
    )
    command[1:1] = [str(arguments.first), str(last)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
