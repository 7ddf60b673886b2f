"""A bar with the time left, on stderr: redrawn in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

_WIDTH = 24
_REDRAW = 0.1
_LINE_EVERY = 30.0
_RECOUNT = 0.2

_T = TypeVar("_T")


class Progress:
    """Counts work done against the work there is, in any unit that grows with its time."""

    def __init__(
        self,
        total: float,
        what: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        deadline: float | None = None,
    ) -> None:
        self._total, self._what = total, what
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._deadline = clock, deadline
        self._start = self._drawn = clock()
        self._done = 0.0
        self._in_place = self._stream.isatty()

    def advance(self, work: float, text: str = "") -> None:
        """``work`` more is done."""
        self._done += work
        now = self._clock()
        if now - self._drawn >= (_REDRAW if self._in_place else _LINE_EVERY):
            self._drawn = now
            self._draw(text)

    def finish(self, text: str = "") -> None:
        """Draw a last time and leave the line."""
        self._draw(text)
        if self._in_place:
            self._stream.write("\n")

    def left(self) -> float | None:
        """Seconds left, by the pace so far; at most until the deadline. None at the start."""
        if not self._done:
            return None
        now = self._clock()
        seconds = (now - self._start) / self._done * max(self._total - self._done, 0.0)
        if self._deadline is not None:
            seconds = min(seconds, max(self._deadline - now, 0.0))
        return seconds

    def _draw(self, text: str) -> None:
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        filled = round(share * _WIDTH)
        left = self.left()
        time_left = "" if left is None else f" {clock_time(left)} left"
        line = f"{self._what} [{'#' * filled:<{_WIDTH}}] {share:4.0%}{time_left}  {text}"
        self._stream.write(f"\r\x1b[K{line[:110]}" if self._in_place else f"{line}\n")
        self._stream.flush()


def clock_time(seconds: float) -> str:
    """``75`` as ``1:15``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


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
        if time.monotonic() - drawn >= _RECOUNT:
            drawn = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{what}: {number} batches")
            sys.stderr.flush()
    sys.stderr.write(f"\r\x1b[K{what}: {number} batches\n")
