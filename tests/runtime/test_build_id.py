"""By what the library knows files that it wrote itself: an id in its notes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cpp import program

_MAIN = Path(__file__).parent / "cpp" / "build_id.cpp"


def test_the_id_among_notes(tmp_path: Path) -> None:
    """It is found behind others, and not beyond them; a program finds the one that it has."""
    made = program(tmp_path, _MAIN, ["runtime/build_id.cpp"], options=["-Wl,--build-id=sha1"])
    ended = subprocess.run([made], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout
    note = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0" + bytes.fromhex(ended.stdout)
    assert note in made.read_bytes()
    none = program(tmp_path, _MAIN, ["runtime/build_id.cpp"], options=["-Wl,--build-id=none"])
    ended = subprocess.run([none], capture_output=True, text=True, timeout=60)
    assert "own.size() == 20" in ended.stdout
