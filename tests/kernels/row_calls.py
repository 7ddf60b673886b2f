"""What tests of the native ops on row codes share."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.native import capi
from tests.native.levels import ISAS
from x86quant import extension

LEVELS = ("reference", *ISAS)


Array = npt.NDArray[Any]


@pytest.fixture(scope="session")
def lib() -> capi.Library:
    library = capi.Library(Path(extension.__file__).with_name("_C.so"))  # what ships
    assert library.enable_amx() == ("amx_int8" in ISAS)
    library.set_caches(48 << 10, 512 << 10)
    return library


def at_page_end(array: Array) -> Array:
    """A copy whose last byte is followed by memory that must not be touched."""
    size = array.nbytes
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    view = np.frombuffer(memory, np.uint8)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(view.ctypes.data + pages), mmap.PAGESIZE, 0)
    copy = view[pages - size : pages].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


OPS = torch.ops.x86quant


def assert_same_codes(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], most: int = 0
) -> None:
    """Row codes that are equal, or of values that rounding moved by up to ``most`` codes."""
    assert [part.shape for part in got] == [part.shape for part in want]
    assert [part.dtype for part in got] == [part.dtype for part in want]
    if got[0].numel():
        assert (got[0].int() - want[0].int()).abs().max() <= most
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0, equal_nan=True)
