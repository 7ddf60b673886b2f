"""Runs the tests of the compiled part under AddressSanitizer and UBSan.

    python -m tests.sanitized
    python -m tests.sanitized tests/runtime/test_runtime.py -k dynamic

Those of the runtime, the kernels of compiled models (which try random shapes) and routed packs,
unless others are named. Builds the whole extension once more, with sanitizers, into a folder of its
own, and runs tests there; torch itself is not instrumented. Needs a checkout and a C++ compiler
with its sanitizer libraries. The native kernels have a fuzzer beside it:
``tests.native.sanitize``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = Path(tempfile.gettempdir()) / f"x86quant-sanitize-{os.getuid()}"
# vptr checks need type information that torch's libraries hide.
FLAGS = (
    "-O1 -fsanitize=address,undefined -fno-sanitize=vptr "
    "-fno-sanitize-recover=all "
    "-fno-omit-frame-pointer"
)
TESTS = (
    "tests/kernels/test_graph_kernels.py",
    "tests/runtime/test_runtime.py",
    "tests/runtime/test_steps.py",
    "tests/runtime/test_row_steps.py",
    "tests/kernels/test_routed.py",
)


def main(arguments: list[str]) -> int:
    """Build, run pytest with ``arguments``, and return its status."""
    if not (ROOT / "setup.py").exists():
        print("this needs a checkout of x86quant: there is no setup.py beside it", file=sys.stderr)
        return 2
    compiler = os.environ.get("CXX", "c++")
    flags = {"X86QUANT_LAST_FLAGS": FLAGS, "LDFLAGS": FLAGS}
    folders = [f"--build-base={BUILD / 'base'}", f"--build-lib={BUILD / 'lib'}"]
    build = ["setup.py", "-q", "build", *folders]
    subprocess.run([sys.executable, *build], cwd=ROOT, env={**os.environ, **flags}, check=True)
    shutil.copytree(ROOT / "tests", BUILD / "lib" / "tests", dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", BUILD / "lib")
    libraries = [_library(compiler, name) for name in ("libasan.so", "libubsan.so")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(BUILD / "lib"),
        "LD_PRELOAD": " ".join(libraries),
        # Python and torch keep memory to the end; what they leak is not ours to find.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or TESTS)]
    return subprocess.run(test, cwd=BUILD / "lib", env=environment, check=False).returncode


def _library(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
