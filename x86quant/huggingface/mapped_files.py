"""Memory of files that are mapped while weights are read from them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_DONT_NEED = 4  # of Linux
_MAPS = Path("/proc/self/maps")


def give_back(files: Iterable[str | os.PathLike[str]]) -> None:
    """Let pages of ``files`` that are mapped here go; they are read again where they are needed.

    Nothing may have been written to such a mapping: that would be lost. Elsewhere than on Linux
    nothing is done, and the pages count until the mapping ends.
    """
    wanted = {os.path.realpath(file) for file in files}
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        for line in _MAPS.read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] in wanted and fields[1].endswith("p"):
                begin, end = (int(x, 16) for x in fields[0].split("-"))
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED)
