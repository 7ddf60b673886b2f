"""Classes that stand for others of the same name and fields, which a process does not have.

A file knows named tuples, dataclasses and enumerations of the user's by name alone.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from typing import Any

#: What marks a class of which only the name counts.
MARK = "_x86quant_stands_for_its_name"


@functools.lru_cache(maxsize=256)
def fields_class(kind: str, name: str, fields: tuple[str, ...]) -> Any:
    """A named tuple ("tuple") or a dataclass ("dataclass") of this name."""
    make: Any = collections.namedtuple if kind == "tuple" else dataclasses.make_dataclass
    made = make(name, fields)
    setattr(made, MARK, True)
    return made


@functools.lru_cache(maxsize=256)
def member(kind: str, name: str) -> enum.Enum:
    """The member of this name of an enumeration of the name ``kind``."""
    made: Any = enum.Enum(kind, [name])  # type: ignore[misc]
    setattr(made, MARK, True)
    # pickle looks a class up by its name, and this one has no place where it could be found.
    setattr(made, "__reduce_ex__", lambda *_: (member, (kind, name)))  # noqa: B010 (an enumeration)
    found: enum.Enum = made[name]
    return found


def stands_for_name(kind: type) -> bool:
    """Whether ``kind`` was made here."""
    return MARK in vars(kind)
