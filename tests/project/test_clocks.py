"""Somebody may set the clock at any time: nothing waits or measures by it."""

from __future__ import annotations

import re
from pathlib import Path

import x86quant
import x86quant.kernels

_WALL_CLOCK = re.compile(
    r"\btime\.time(_ns)?\(|\bfrom time import.*\btime\b|\bsystem_clock\b|\bCLOCK_REALTIME\b"
    r"|\bgettimeofday\b|\bcond_timedwait\b|\bst_mtime\b"
)


def test_nothing_asks_the_clock_on_the_wall() -> None:
    """But for a date that is written down, which takes ``datetime``."""
    packages = [Path(x86quant.__file__).parent, Path(x86quant.kernels.__file__).parent]
    files = [
        path
        for package in packages
        for path in package.rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    ]
    assert len(files) > 300
    assert not [str(path) for path in files if _WALL_CLOCK.search(path.read_text())]
