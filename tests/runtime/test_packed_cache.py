"""Files of packed weights: what is written is what is read, and nothing else is."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cpp import program

_MAIN = Path(__file__).parent / "cpp" / "packed_cache.cpp"


def test_packed_caches(tmp_path: Path) -> None:
    names = ("packed_cache", "build_id", "whole_file", "numa")
    made = program(
        tmp_path, _MAIN, [f"runtime/{one}.cpp" for one in names], options=["-Wl,--build-id=sha1"]
    )
    ended = subprocess.run([made, tmp_path / "packed"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "program"]
