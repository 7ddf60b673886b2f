"""Modules that keep what they made of the sizes of one call, for calls of the same sizes.

A detection head keeps its anchors, say, and the shape that they are for::

    if self.shape != x.shape:
        self.anchors, self.shape = make_anchors(x), x.shape

A trace of that would hold for the shape that is kept alone. Traced with a shape kept that is unlike
all others, it makes what is kept, of any sizes.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from x86quant.calling.call import Call
from x86quant.calling.running import run
from x86quant.calling.state import state_kept
from x86quant.capture.variants import resized, shared_rows


class _UnlikeAll:
    """Is equal to nothing."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True


def forget_sizes(module: nn.Module, call: Call) -> None:
    """Let ``module`` make anew, at its next call, what it keeps for calls of the same sizes.

    Which attributes say what sizes these are is seen by a ``call`` with other numbers of rows.
    """
    places = [(inner, name) for inner in module.modules() for name in _kept_sizes(inner)]
    rows = shared_rows(call)
    if not places or not rows:
        return
    before = [vars(inner)[name] for inner, name in places]
    with state_kept(module):
        try:
            run(module, resized(call, 0, rows, 1 if rows > 1 else 2))
        except Exception:  # of the user's code; it takes these rows alone, then
            return
        now = [vars(inner).get(name) for inner, name in places]
    for (inner, name), old, new in zip(places, before, now, strict=True):
        if old != new and _is_of_sizes(new):
            vars(inner)[name] = _UnlikeAll()


def _kept_sizes(module: nn.Module) -> list[str]:
    """The attributes of ``module`` that are sizes and may become others."""
    kind: Any = type(module)
    return [name for name in _set_by_methods(kind) if _is_of_sizes(vars(module).get(name))]


def _is_of_sizes(value: Any) -> bool:
    if isinstance(value, tuple):  # such as torch.Size
        return bool(value) and all(map(_is_of_sizes, value))
    return isinstance(value, int) and not isinstance(value, bool)


@functools.cache
def _set_by_methods(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names that methods of the class ``kind`` store, but those that make an object."""
    if kind.__module__.startswith("torch."):
        return ()
    found = {
        name
        for owner in kind.__mro__
        if owner not in nn.Module.__mro__
        for method in vars(owner).values()
        if isinstance(method, types.FunctionType) and method.__name__ != "__init__"
        for name in _stored(method)
    }
    return tuple(sorted(found))


def _stored(method: types.FunctionType) -> Iterator[str]:
    """The names of attributes that ``method`` stores."""
    for step in dis.get_instructions(method):
        if step.opname == "STORE_ATTR":
            yield step.argval
