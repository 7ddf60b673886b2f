"""Runs the tests of the compiled part under AddressSanitizer and UBSan.

    python -m tests.sanitized
    python -m tests.sanitized tests/runtime/test_runtime.py -k dynamic

Those of the runtime, the kernels of compiled models (which try random shapes), threads and routed
packs, unless others are named; not those of forks, since AddressSanitizer's own allocator is left
locked in a process that is forked while another thread allocates (GCC 12). What ``setup.py``
describes is built once more, with the sanitizers, beside a copy of the package, with the objects
that ``tests.native.sanitize --emulate`` and ``tools.sanitize_serving`` have: AMX and AVX-VNNI are
emulated. torch itself is not instrumented. Needs a checkout and a C++ compiler with its sanitizer
libraries.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest import mock

from tests.native.build import (
    DEFAULT_DIRECTORY,
    SANITIZERS,
    build,
    compiled,
    link_shared,
    without_torch,
)
from tests.native.build import sources as native_sources
from x86quant.kernels.native import toolchain

ROOT = Path(__file__).resolve().parents[1]
CHECKOUT = DEFAULT_DIRECTORY.parent / "sanitized"
#: Whether this process is one of the tests that are run here.
RUNNING = "libasan" in os.environ.get("LD_PRELOAD", "")
#: What a copy of the checkout holds.
COPIED = ("x86quant", "kernels", "rules", "tests", "benchmarks", "docs", "pyproject.toml")
TESTS = (
    "tests/kernels/test_graph_kernels.py",
    "tests/kernels/test_group_kernels.py",
    "tests/kernels/test_row_kernels.py",
    "tests/kernels/test_attention_kernels.py",
    "tests/kernels/test_routed.py",
    "tests/kernels/test_threads.py",
    "tests/ops",
    "tests/runtime",
    "tests/serving/test_hostile_programs.py::test_sentences_lie_one_behind_another",
)


def copied() -> Path:
    """The sources of the checkout without what was compiled of them."""
    shutil.rmtree(CHECKOUT, ignore_errors=True)
    without = shutil.ignore_patterns("__pycache__", "*.so")
    for name in COPIED:
        source, target = ROOT / name, CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=without, symlinks=True)
        else:
            shutil.copy(source, target)
    for name in ("kernels", "rules"):  # parts of the package, by pyproject.toml
        if not (link := CHECKOUT / "x86quant" / name).exists():
            link.symlink_to(Path("..", name))
    return CHECKOUT


def described() -> list[Any]:
    """The extensions of ``setup.py``, the main one first."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path("setup.py")
    extensions: list[Any] = setup.call_args.kwargs["ext_modules"]
    return extensions


def link(extension: Any, package: Path) -> Path:
    """``extension`` with the sanitizers, in ``package``."""
    flags = [*toolchain.flags(), *SANITIZERS["address"]]
    kernels = build(sanitizer="address", emulate=True)
    elsewhere = {*native_sources(), *without_torch()}
    own = [x for x in (Path(x).resolve() for x in extension.sources) if x not in elsewhere]
    name = extension.name.rpartition(".")[2]
    folders = [*extension.include_dirs, sysconfig.get_path("include")]
    # vptr checks need type information that torch's libraries hide.
    last = [*SANITIZERS["address"], "-fno-sanitize=vptr", f"-DTORCH_EXTENSION_NAME={name}"]
    objects = compiled(
        own,
        DEFAULT_DIRECTORY,
        [*extension.extra_compile_args, *(f"-I{x}" for x in folders), *last],
    )
    libraries = [*(f"-L{x}" for x in extension.library_dirs), "-pthread"]
    libraries += [f"-l{x}" for x in extension.libraries]
    if name == "_C":
        objects += [*compiled(without_torch(), DEFAULT_DIRECTORY, flags), kernels]
    elif "_stock_" in name:
        objects += [package / "_C.so", kernels]
    libraries.append(f"-Wl,-rpath,{kernels.parent}")
    library = package / f"{name}.so"
    link_shared(objects, library, [*flags, *extension.extra_link_args, *libraries])
    return library


def link_runtime(package: Path) -> None:
    """The library that serves program files, in the same way."""
    flags = [*toolchain.flags(), *SANITIZERS["address"]]
    kernels = build(sanitizer="address", emulate=True)
    serving = ROOT / "kernels" / "serving"
    objects = compiled(
        sorted(serving.glob("*.cpp")), DEFAULT_DIRECTORY, [*flags, "-I", str(serving / "include")]
    )
    objects += [*compiled(without_torch(), DEFAULT_DIRECTORY, flags), kernels]
    library = package / "libx86quant_runtime.so"
    link_shared(objects, library, [*flags, "-pthread", f"-Wl,-rpath,{kernels.parent}"])


def main(arguments: list[str]) -> int:
    """Build, run pytest with ``arguments``, and return its status."""
    if not (ROOT / "setup.py").exists():
        print("this needs a checkout of x86quant: there is no setup.py beside it", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    checkout = copied()
    for extension in described():
        link(extension, checkout / "x86quant")
    link_runtime(checkout / "x86quant")
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "X86QUANT_TESTS_EMULATE": "1",  # the kernels are built so, wherever AMX is asked for
        "LD_PRELOAD": " ".join(_library(name) for name in ("libasan.so", "libubsan.so")),
        # Python and torch keep memory to the end; what they leak is not ours to find.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # Other steps of CI end before this one, which then has their core, too.
    test = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider"]
    test += arguments or TESTS
    return subprocess.run(test, cwd=checkout, env=environment, check=False).returncode


def _library(name: str) -> str:
    command = [*shlex.split(toolchain.compiler()), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
