"""What a fuzzer knows of a reader: what it reads, how that is changed, and how far a read went."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path


class Depth(enum.Enum):
    """How far an input got."""

    FIRST = "refused at once"
    REFUSED = "refused further in"
    READ = "read"


class WrongAnswerError(Exception):
    """A reader took what it should have refused, or made something else of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """A reader of files, or of what else comes from outside.

    Attributes:
        samples: inputs that it reads.
        change: another input, made of a sample.
        read: reads an input, and says how far it got. What it raises is a finding.
        least: the share of the inputs that must get past the first check, so that the others are
            tested at all.
    """

    samples: Sequence[bytes]
    change: Callable[[random.Random, bytes], bytes]
    read: Callable[[bytes], Depth]
    least: float = 0.5


def refused(error: BaseException, first: Collection[str]) -> Depth:
    """How far an input got that was refused by ``error``.

    Args:
        error: as it was caught.
        first: where the first check is: modules of ``x86quant``, or "module:function". It refused
            if the innermost function of ``x86quant`` is there, or one that called it.
    """
    trace = error.__traceback__
    found = Depth.REFUSED
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "").removeprefix("x86quant.")
        if module in first or f"{module}:{trace.tb_frame.f_code.co_name}" in first:
            found = Depth.FIRST
        trace = trace.tb_next
    return found


def in_file(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """``read`` given a file that holds the bytes."""
    path = folder / name

    def of_bytes(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return of_bytes
