"""Memory of files that are mapped while weights are read from them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from pathlib import Path

import torch

_DONT_NEED = 4  # of Linux
#: Bytes of tensors from which on it is worth a look at what is mapped.
_WORTH_A_LOOK = 2**18
_MAPS = Path("/proc/self/maps")


def give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Let the pages go of the files that are mapped where ``tensors`` lie; they are read again.

    Nothing may have been written to these mappings: that would be lost. So they are found by
    tensors, not by names of files, of which others may have mappings of their own. Elsewhere than
    on Linux nothing is done, and the pages count until the mapping ends.
    """
    here = [x for x in tensors if x.device.type == "cpu"]
    if sum(x.nbytes for x in here) < _WORTH_A_LOOK:
        return
    places = {x.data_ptr() for x in here}
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        for line in _MAPS.read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) < 6 or not fields[5].startswith("/") or not fields[1].endswith("p"):
                continue
            begin, end = (int(x, 16) for x in fields[0].split("-"))
            if any(begin <= place < end for place in places):
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED)
