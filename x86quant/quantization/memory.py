"""What the C library does with memory while ``quantize`` runs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

#: Parameters of glibc's ``mallopt``.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MB = 1 << 20
#: What a process has once it has freed a large tensor: glibc raises both by itself, up to this.
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * _MB, _TRIM_THRESHOLD: 64 * _MB}
#: Nothing is mapped by itself, and nothing goes back.
_KEEPING = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """A block in which memory that was freed is taken again; it goes back at the end.

    As a rule large tensors are mapped one by one, and each value between two layers, gone a moment
    later, costs a page fault for every 4 KB: a quarter of the time of ``quantize``.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):  # not glibc
        yield
        return

    def give(options: dict[int, int]) -> None:
        for name, value in options.items():
            library.mallopt(name, value)

    give(_KEEPING)
    try:
        yield
    finally:
        give(_USUAL)
        library.malloc_trim(0)
