"""Builds the native kernels into one shared library: ``python -m tests.native.build``.

Flags are those of ``toolchain.py``; sources do without exceptions. Objects are
rebuilt when a source or a header is newer than they are, and for other flags.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from x86quant.kernels.native import toolchain

SOURCES = Path(toolchain.__file__).resolve().parent
DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "build" / "native"
#: Instructions of AMX and AVX-VNNI become functions: ``emulated_tiles.h``.
EMULATE_FLAGS = ["-DXQ_EMULATED"]
_SANITIZED = [
    "-O1",  # sanitizers make -O3 slow to compile
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",  # lines of code, for the reports
]
#: AddressSanitizer with UBSan, and ThreadSanitizer, which cannot be together; counts of lines run.
SANITIZERS = {
    "address": [*_SANITIZED, "-fsanitize=address,undefined"],
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


def _compile(source: Path, objects: Path, flags: list[str]) -> Path:
    newest = max(path.stat().st_mtime for path in [source, *SOURCES.glob("*.h")])
    command = [*shlex.split(toolchain.compiler()), *flags]
    key = hashlib.sha256(" ".join(command).encode()).hexdigest()[:12]
    target = objects / f"{source.stem}-{key}.o"
    if not target.exists() or target.stat().st_mtime < newest:
        subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True)
    return target


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
        *(EMULATE_FLAGS if emulate else []),
    ]
    directory.mkdir(parents=True, exist_ok=True)
    kind = f"_{sanitizer}" if sanitizer else ""
    library = directory / f"libxq_native{kind}{'_emulated' * emulate}.so"
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, directory, flags), sources()))
    newest = max(path.stat().st_mtime for path in objects)
    if not library.exists() or library.stat().st_mtime < newest:
        # Linked aside and moved into place: a process may have the old library mapped.
        aside = library.with_suffix(f".{os.getpid()}.so")
        link = [
            *shlex.split(toolchain.compiler()),
            *flags,
            "-shared",
            *map(str, objects),
            "-o",
            str(aside),
        ]
        subprocess.run(link, check=True)
        aside.replace(library)
    return library


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
