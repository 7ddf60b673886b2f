"""Small C++ programs around some files of ours."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from x86quant.kernels.native import toolchain

KERNELS = Path(__file__).parents[1] / "kernels"


def program(folder: Path, main: str, sources: Sequence[str]) -> Path:
    """``main`` compiled in ``folder`` with files of ``kernels/``; skips without a compiler."""
    compiler = shlex.split(toolchain.compiler())
    if shutil.which(compiler[0]) is None:
        pytest.skip("no C++ compiler here")
    if not KERNELS.exists():  # a wheel is tested, which holds none
        pytest.skip("the sources are not here")
    (folder / "main.cpp").write_text(main)
    files = [str(folder / "main.cpp"), *(str(KERNELS / source) for source in sources)]
    made = folder / "program"
    flags = [toolchain.STANDARD, "-I", str(KERNELS), "-o", str(made)]
    subprocess.run([*compiler, *flags, *files], check=True)
    return made
