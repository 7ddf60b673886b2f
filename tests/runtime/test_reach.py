"""What steps are taken to touch, against every byte of random tensors counted one by one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cpp import program

_MAIN = Path(__file__).parent / "cpp" / "reach.cpp"


def test_reach_is_what_is_touched(tmp_path: Path) -> None:
    """Nothing that meets is apart, and what is surely written is written, before it is read."""
    made = program(tmp_path, _MAIN, ["runtime/reach.cpp"])
    ended = subprocess.run([made], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    apart, *sure = map(int, ended.stdout.split())
    assert apart > 2_000
    assert min(sure) > 100
