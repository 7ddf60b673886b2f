"""Builds the native kernels into one shared library: ``python -m tests.native.build``.

Flags are those of ``toolchain.py``; sources do without exceptions. Objects are rebuilt when
anything that they were made from is newer than they are, and for other flags. So are those that
others here compile with a sanitizer, who share them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from x86quant.hardware.cpu import cpu
from x86quant.kernels.native import toolchain

SOURCES = Path(toolchain.__file__).resolve().parent
DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "build" / "native"
#: Instructions of AMX and AVX-VNNI become functions: ``emulated_tiles.h``.
EMULATE_FLAGS = ["-DXQ_EMULATED"]
#: What kernels of a level need, by the end of their file's name.
_NEEDS = {
    "avx2": "avx2", "avx_vnni": "avx_vnni", "avx512": "avx512", "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512", "amx": "amx_int8", "amx_bf16": "amx_int8",
}  # fmt: skip
#: What stands for a feature where its instructions are functions.
EMULATED_ON = {"avx_vnni": "avx2", "amx_int8": "avx512_vnni"}
_SANITIZED = [
    "-O1",  # sanitizers make -O3 slow to compile
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",  # lines of code, for the reports
    "-DXQ_SANITIZED",  # kernels/native/unroll.h
]
#: AddressSanitizer with UBSan, and ThreadSanitizer, which cannot be together; counts of lines run.
SANITIZERS = {
    "address": [
        *_SANITIZED,
        "-fsanitize=address,undefined",
        # Each access asks a function: written out, the checks take twice as long to compile.
        "--param=asan-instrumentation-with-call-threshold=0",
        "-Wno-unused-command-line-argument",  # clang has another name for that, and no need of it
    ],
    "thread": [*_SANITIZED, "-fsanitize=thread"],
    "coverage": [
        "-O1",
        "--coverage",
        "-fprofile-abs-path",
        "-fprofile-update=atomic",
        "-DXQ_COUNTS_LINES",
    ],
}


def sources() -> list[Path]:
    """Every translation unit of the library."""
    return sorted(SOURCES.glob("*.cpp"))


def without_torch() -> list[Path]:
    """What the extension and the library that serves program files both hold, but the kernels."""
    kernels = SOURCES.parent
    runtime = [kernels / "runtime" / f"{name}.cpp" for name in toolchain.WITHOUT_TORCH]
    return sorted([*(kernels / "steps").glob("*.cpp"), *runtime])


def compiled(files: Iterable[Path], directory: Path, flags: Sequence[str]) -> list[Path]:
    """The objects of ``files``, in their order; only what is not fresh is compiled.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its output is on stderr.
        FileNotFoundError: there is no compiler.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda source: _compile(source, directory, flags), files))


def _compile(source: Path, directory: Path, flags: Sequence[str]) -> Path:
    command = [*shlex.split(toolchain.compiler()), *flags, "-MMD"]
    key = hashlib.sha256(" ".join(command).encode()).hexdigest()[:12]
    target = directory / f"{source.parent.name}-{source.stem}-{key}.o"
    if not _is_fresh(target):
        # Moved into place: another process may compile the same, or link what is there.
        aside = target.with_suffix(f".{os.getpid()}.o")
        subprocess.run([*command, "-c", str(source), "-o", str(aside)], check=True)
        aside.with_suffix(".d").replace(target.with_suffix(".d"))
        aside.replace(target)
    return target


def _is_fresh(target: Path) -> bool:
    """Whether nothing that the compiler read for ``target`` is newer, as it noted beside it."""
    noted = target.with_suffix(".d")
    if not (target.exists() and noted.exists()):
        return False
    _, _, read = noted.read_text().replace("\\\n", " ").partition(":")
    made = target.stat().st_mtime
    return all(Path(x).exists() and Path(x).stat().st_mtime <= made for x in shlex.split(read))


def build(
    directory: Path = DEFAULT_DIRECTORY, *, sanitizer: str | None = None, emulate: bool = False
) -> Path:
    """Compile what changed and link it. Returns the library's path.

    Args:
        directory: of objects and library.
        sanitizer: one of ``SANITIZERS``.
        emulate: AMX and AVX-VNNI by other instructions, for tests on CPUs without them.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its output is on stderr.
        FileNotFoundError: there is no compiler.
    """
    flags = [
        *toolchain.flags(),
        "-fno-exceptions",
        *(SANITIZERS[sanitizer] if sanitizer else []),
    ]
    # What this CPU cannot run takes minutes to compile, and is only there to be linked.
    idle = [path for path in sources() if sanitizer and not _runs_here(path, emulate)]
    empty = [_empty(idle, directory)] if idle else []
    objects = compiled(empty, directory, [*flags, "-I", str(SOURCES)])
    others = [path for path in sources() if path not in idle]
    # Only what asks for it: the rest is the same either way.
    asks = [path for path in others if emulate and "emulated" in path.read_text().lower()]
    objects += compiled(asks, directory, [*flags, *EMULATE_FLAGS])
    objects += compiled([path for path in others if path not in asks], directory, flags)
    kind = f"_{sanitizer}" if sanitizer else ""
    library = directory / f"libxq_native{kind}{'_emulated' * emulate}.so"
    link_shared(objects, library, flags)
    return library


#: What kernels of a level define: tables of functions, and functions of one task.
_DEFINED = re.compile(r"^(const \w+ k\w+) = |^(void \w+\(const DenseTask&) t\) \{", re.MULTILINE)


def _empty(idle: Iterable[Path], directory: Path) -> Path:
    """A source that defines what those ``idle`` do, so that whoever calls it ends the process."""
    found = [x for path in idle for x in _DEFINED.findall(path.read_text())]
    headers = ("<cstdlib>", '"float_loops.h"', '"internal.h"', '"row_tasks.h"')
    lines = [f"#include {name}" for name in headers]
    lines += ["namespace xq {", *(f"{table} = {{}};" for table, _ in found if table)]
    lines += [f"{one}) {{ std::abort(); }}" for _, one in found if one]
    text = "\n".join([*lines, "}  // namespace xq", ""])
    # By what it holds: others, who leave out others, may build at the same time.
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    source = directory / "idle" / f"kernels_{key}.cpp"
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        aside = source.with_suffix(f".{os.getpid()}.cpp")
        aside.write_text(text)
        aside.replace(source)
    return source


def _runs_here(source: Path, emulate: bool) -> bool:
    """Whether this CPU can run the kernels in ``source``."""
    needed = _NEEDS.get(source.stem.partition("_")[2])
    if emulate and needed is not None:
        needed = EMULATED_ON.get(needed, needed)
    return needed is None or needed in cpu().features


def link_shared(objects: Sequence[Path], library: Path, flags: Sequence[str]) -> None:
    """Link ``objects`` as ``library``, if any is newer."""
    newest = max(path.stat().st_mtime for path in objects)
    if library.exists() and library.stat().st_mtime >= newest:
        return
    # Linked aside and moved into place: a process may have the old library mapped.
    aside = library.with_suffix(f".{os.getpid()}.so")
    compiler = shlex.split(toolchain.compiler())
    link = [*compiler, "-shared", *map(str, objects), *flags, "-o", str(aside)]
    subprocess.run(link, check=True)
    aside.replace(library)


def main() -> int:
    """Build and print the library's path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--sanitizer", choices=[*SANITIZERS])
    parser.add_argument("--emulate", action="store_true", help="AMX and AVX-VNNI by others")
    arguments = parser.parse_args()
    print(build(arguments.directory, sanitizer=arguments.sanitizer, emulate=arguments.emulate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
