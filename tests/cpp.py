"""Small C++ programs around some files of ours."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from x86quant.cpp_library import CppPaths
from x86quant.kernels.native import toolchain

KERNELS = Path(__file__).parents[1] / "kernels"


def program(
    folder: Path,
    main: str | Path,
    sources: Sequence[str],
    library: CppPaths | None = None,
    options: Sequence[str] = (),
) -> Path:
    """``main``, a file or its text, compiled in ``folder`` with files of ``kernels/``.

    With a ``library`` it is linked against that, with ``options`` so. Skips without a compiler.
    """
    compiler = shlex.split(toolchain.compiler())
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C++ compiler here")
    if not KERNELS.exists():  # a wheel is tested, which holds none
        pytest.skip("the sources are not here")
    if isinstance(main, str):
        (folder / "main.cpp").write_text(main)
        main = folder / "main.cpp"
    files = [str(main), *(str(KERNELS / source) for source in sources)]
    made = folder / "program"
    flags = [toolchain.STANDARD, *options, "-I", str(KERNELS), "-o", str(made)]
    if library is not None:
        files += [str(library.library), f"-Wl,-rpath,{library.library.parent}"]
        flags += ["-I", str(library.include)]
    subprocess.run([*compiler, *flags, *files], check=True)
    return made
