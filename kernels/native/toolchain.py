"""What the C++ is compiled with, by ``setup.py`` and ``build.py``, and whether a compiler can.

Stands alone, because ``setup.py`` loads it by its path before anything is installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

#: The files of ``kernels/runtime`` that need no torch.
WITHOUT_TORCH = (
    "arenas", "build_id", "conv_kernel", "glibc_floor", "libstdcxx_floor", "native_conv",
    "native_cpu", "numa", "packed_cache", "program", "reach", "row_pack", "scratch", "step",
    "strided_copy", "team", "weight_extremes", "weights_memory", "whole_file",
)  # fmt: skip

PROBE = Path(__file__).resolve().parent / "probe" / "probe.cpp"
STANDARD = "-std=c++20"

#: Each file names its own instruction set (``target.h``), so every file has the same flags.
FLAGS = [
    STANDARD,
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # results must not depend on the instruction set
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
]
_GCC_FLAGS = [
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",  # GCC 12 warns inside its own AVX-512 headers
    "-Wno-uninitialized",  # the same
]


def compiler() -> str:
    """The C++ compiler: ``CXX`` or ``c++``."""
    return os.environ.get("CXX") or "c++"


def flags() -> list[str]:
    """``FLAGS`` and those that only GCC knows, if that is what ``compiler()`` is."""
    command = [*shlex.split(compiler()), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return FLAGS if "__clang__" in macros else FLAGS + _GCC_FLAGS


def why_not() -> str | None:
    """Why ``compiler()`` cannot build the extension, in one line; None if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"its kernels are for x86-64 CPUs, and this one is {platform.machine()}"
    if sys.platform != "linux":
        return f"its compiled part is for Linux, and this is {sys.platform}"
    with tempfile.TemporaryDirectory() as folder:
        command = [*shlex.split(compiler()), STANDARD, "-c", str(PROBE)]
        try:
            done = subprocess.run(
                [*command, "-o", str(Path(folder) / "probe.o")],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return f"there is no C++ compiler ({compiler()})"
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    first = errors[0].partition("error: ")[2] or errors[0] if errors else "it fails"
    return (
        f"the C++ compiler ({compiler()}) cannot build it: {first}; "
        "GCC from 11 on and clang from 14 on can"
    )
