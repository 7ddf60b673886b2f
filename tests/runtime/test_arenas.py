"""The memory that programs share: which of it a run gets, what it holds, and what is kept."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cpp import program

_MAIN = Path(__file__).parent / "cpp" / "arenas.cpp"


def test_arenas(tmp_path: Path) -> None:
    """Each in a process of its own: what is kept is the process's."""
    made = program(tmp_path, _MAIN, [f"runtime/{name}.cpp" for name in ("arenas", "numa")])
    for which in range(4):
        ended = subprocess.run([made, str(which)], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout
