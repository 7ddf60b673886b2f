"""Progress on stderr while data streams by: a bar where the length is known, else a count."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from x86quant.terminal.progress import Progress

_T = TypeVar("_T")
_REDRAW = 0.2


def counted(items: Iterable[_T], length: int | None, what: str, *, shown: bool) -> Iterator[_T]:
    """``items`` as they are, counted on stderr if that is a terminal and ``shown``."""
    if not (shown and sys.stderr.isatty()):
        yield from items
    elif length:
        bar = Progress(length, what)
        number = 0
        for number, item in enumerate(items, start=1):
            yield item
            bar.advance(1, f"batch {number} of {length}")
        bar.finish(f"{number} batches")
    else:
        yield from _counted_up(items, what)


def _counted_up(items: Iterable[_T], what: str) -> Iterator[_T]:
    drawn, number = time.monotonic(), 0
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - drawn >= _REDRAW:
            drawn = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{what}: {number} batches")
            sys.stderr.flush()
    sys.stderr.write(f"\r\x1b[K{what}: {number} batches\n")
