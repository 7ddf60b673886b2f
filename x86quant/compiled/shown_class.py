"""The class that a part of a model shows to the code around it: that of what it stands for.

Code of the user's asks ``isinstance(layer, Block)`` to know how it may call its own layers.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

#: Whose classes promise what a graph does not keep: weights, items, other methods.
_OF_LIBRARIES = ("torch", "x86quant")
_STATE = ("get_extra_state", "set_extra_state")
_CLASS = object.__dict__["__class__"]


class ShowsClass(nn.Module):
    """A module that may show another class than its own: ``isinstance`` takes it for both.

    ``type`` answers its own class.
    """

    @property
    def __class__(self) -> type:
        return self.__dict__.get("_shown") or type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        _CLASS.__set__(self, kind)

    def show_class_of(self, original: nn.Module) -> None:
        """Show the class of ``original`` from now on, unless it is one of torch's.

        Nor one with a state of its own beside its tensors, which torch would ask the class for.
        """
        kind = original.__class__
        stateful = any(getattr(kind, name) is not getattr(nn.Module, name) for name in _STATE)
        if not stateful and kind.__module__.partition(".")[0] not in _OF_LIBRARIES:
            self.__dict__["_shown"] = kind

    def _get_name(self) -> str:
        return type(self).__name__

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(type(self))})  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        # What Python does by itself goes by the class that is shown.
        return _new, (type(self),), self.__getstate__()  # type: ignore[no-untyped-call]


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def pickled_class(kind: type | None) -> tuple[str, str] | None:
    """What a pickle says of a class that it can do without; None of one that no module has."""
    return (
        None if kind is None or "<" in kind.__qualname__ else (kind.__module__, kind.__qualname__)
    )


def unpickled_class(said: tuple[str, str] | None) -> type | None:
    """The class that was pickled, where the process has it: nothing is imported for it."""
    if said is None:
        return None
    found: Any = sys.modules.get(said[0])
    for name in said[1].split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else None
