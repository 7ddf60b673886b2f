"""Whether code that is traced stands in a ``try`` that would catch what an op raises at some sizes.

torch.fx sees the one way that was taken, and no op fails while it is traced: at sizes where the
module goes the other way, its graph would fail.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

#: What no op raises for the sizes of its arguments.
_OTHER_ERRORS = (TypeError, ImportError, AttributeError, KeyError, StopIteration)
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
#: Where an error is held against a class. Handlers ask within the first few of their instructions.
_MATCHES = ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")
_FEW = 8


def errors_are_caught(frame: FrameType | None) -> bool:
    """Whether ``frame``, or what has called it, would catch a RuntimeError; of the user's code."""
    while frame is not None and frame.f_code.co_name != "trace":
        own = frame.f_code.co_filename.startswith(_OWN)
        if not own and any(
            _catches(frame, name) for name in _caught_at(frame.f_code, frame.f_lasti)
        ):
            return True
        frame = frame.f_back
    return False


def errors_are_caught_near(frame: FrameType | None, end: CodeType) -> bool:
    """Whether the code of ``frame``, or of what has called it, up to ``end``, catches one anywhere.

    What such code calls may get something else than what was seen.
    """
    while frame is not None and frame.f_code is not end:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN) and any(
            _catches(frame, name) for name in _caught_anywhere(code)
        ):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _caught_anywhere(code: CodeType) -> frozenset[str | None]:
    if sys.version_info < (3, 11):
        offsets = {blocks: offset for offset, blocks in _blocks(code).items() if blocks}.values()
    else:
        offsets = {e.target: e.start for e in dis._parse_exception_table(code)}.values()
    return frozenset(name for offset in offsets for name in _caught_at(code, offset))


def _catches(frame: FrameType, name: str | None) -> bool:
    """Whether an ``except`` of the class called ``name`` in ``frame`` is of errors of ops."""
    if name is None:
        return True
    builtin = frame.f_builtins.get(name)
    kind = frame.f_locals.get(name, frame.f_globals.get(name, builtin))
    if not isinstance(kind, type):
        return True
    home = kind.__module__.partition(".")[0]
    # Ops raise no error of another library's, of einops say.
    return home in ("builtins", "torch") and not issubclass(kind, _OTHER_ERRORS)


@functools.lru_cache(maxsize=4096)
def _caught_at(code: CodeType, offset: int) -> tuple[str | None, ...]:
    """What stands behind ``except`` in the handlers around an instruction; None: no name."""
    found: list[str | None] = []
    for start in _handlers(code, offset):
        handler = [i for i in _instructions(code) if i.offset >= start][:_FEW]
        names = [i.opname for i in handler]
        if names[0] == "PUSH_EXC_INFO":  # before Python 3.11 there is none
            del names[0]
        # "except:" of anything, and what contextlib.suppress stands for.
        if names[0] == "POP_TOP" or (
            names[0] == "WITH_EXCEPT_START" and "suppress" in code.co_names
        ):
            found.append(None)
        for before, after in itertools.pairwise(handler):
            if after.opname in _MATCHES:
                found.append(before.argval if before.opname.startswith("LOAD_") else None)
                break
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """All of them; a forward that was made from a graph has thousands."""
    return tuple(dis.get_instructions(code))


def _handlers(code: CodeType, offset: int) -> Iterator[int]:
    """Where the handlers around an instruction start, the innermost first."""
    if sys.version_info < (3, 11):
        yield from reversed(_blocks(code).get(offset, ()))
        return
    table = dis._parse_exception_table(code)
    seen: set[int] = set()
    while True:
        handlers = [e.target for e in table if e.start <= offset < e.end and e.target not in seen]
        if not handlers:
            return
        offset = handlers[-1]
        seen.add(offset)
        yield offset


#: What leads nowhere else than to its own target, or out of the function.
_LEAVES = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE")


@functools.lru_cache(maxsize=256)
def _blocks(code: CodeType) -> dict[int, tuple[int, ...]]:
    """For each instruction, before Python 3.11, the handlers of the blocks that it stands in."""
    instructions = _instructions(code)
    places = {one.offset: place for place, one in enumerate(instructions)}
    found: dict[int, tuple[int, ...]] = {}
    left: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while left:
        place, blocks = left.pop()
        if place >= len(instructions) or instructions[place].offset in found:
            continue
        one = instructions[place]
        found[one.offset] = blocks
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:  # a handler's start, too
            left.append((places[one.argval], blocks))
        if one.opname.startswith("SETUP_"):
            blocks = (*blocks, one.argval)
        elif one.opname == "POP_BLOCK":
            blocks = blocks[:-1]
        if one.opname not in _LEAVES:
            left.append((place + 1, blocks))
    return found
