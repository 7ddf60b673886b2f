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


class _Items(collections.OrderedDict[str, Any]):
    """What a dataclass is that is a dict as well: fields that are not None are items.

    So are results of diffusers and of transformers, which are read by number, too.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The items without their names."""
        return tuple(self.values())


def form_of(kind: Any) -> str | None:
    """The form of a class with named fields, as ``fields_class`` takes it; None for another."""
    if issubclass(kind, tuple):
        return "tuple" if hasattr(kind, "_fields") else None
    if not hasattr(kind, "__dataclass_fields__"):
        return None
    return "mapping" if issubclass(kind, dict) else "dataclass"


@functools.lru_cache(maxsize=256)
def fields_class(form: str, name: str, fields: tuple[str, ...]) -> Any:
    """A named tuple ("tuple"), a dataclass ("dataclass") or one that is a dict ("mapping")."""
    if form == "mapping":
        values = [(field, Any, None) for field in fields]
        made = dataclasses.make_dataclass(name, values, bases=(_Items,), eq=False)
    else:
        make: Any = collections.namedtuple if form == "tuple" else dataclasses.make_dataclass
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
