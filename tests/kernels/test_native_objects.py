"""Compiled files of the native kernels, as the linker sees them."""

from __future__ import annotations

import subprocess

import pytest

from tests.native.build import DEFAULT_DIRECTORY
from x86quant.cpp_library import cpp_paths


def test_files_for_larger_instruction_sets_lend_nothing_to_others() -> None:
    """A weak symbol of theirs could be the one that the linker keeps, on a CPU that lacks them."""
    root = DEFAULT_DIRECTORY.parents[1]
    native = root / "kernels" / "native"
    sources = {
        path.stem for pattern in ("isa_*.cpp", "floats_*.cpp") for path in native.glob(pattern)
    }
    folders = sorted(
        (root / "build").glob("objects-*/kernels/native"), key=lambda p: p.stat().st_mtime
    )
    if not folders:
        pytest.skip("nothing was built here")
    for stem in sorted(sources):
        symbols = subprocess.run(
            ["nm", folders[-1] / f"{stem}.o"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert len(symbols) > 2
        weak = [line for line in symbols if line.split()[-2] in "WwVvu"]
        assert not weak, f"{stem}.o has weak symbols: {weak[:3]}"


def test_ends_of_threads_need_no_memory() -> None:
    """glibc ends a process that has none left to note what a thread must destroy in the end."""
    folder = cpp_paths().library.parent
    libraries = [path for path in folder.glob("*.so") if "_torch_" not in path.name]
    assert len(libraries) >= 2
    for library in libraries:
        symbols = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout
        assert "malloc" in symbols or "memalign" in symbols
        assert "__cxa_thread_atexit" not in symbols, (
            f"{library.name}: a thread_local with a destructor"
        )
