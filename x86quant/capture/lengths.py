"""``len(x)`` of a traced tensor: the size of its first dimension, not a number of the example."""

from __future__ import annotations

import builtins
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_MISSING = object()


@contextlib.contextmanager
def lengths_by(module: nn.Module, length: Callable[[Any], Any]) -> Iterator[None]:
    """A block in which the code of ``module`` and of its parts calls ``length`` where it says len.

    Python wants a number of ``__len__``, so that a proxy cannot answer with a size. Files that have
    a ``len`` of their own keep it, and torch's files are left alone.
    """
    spaces = _globals_of(module)
    before = [space.get("len", _MISSING) for space in spaces]
    for space in spaces:
        space["len"] = length
    try:
        yield
    finally:
        for space, old in zip(spaces, before, strict=True):
            if old is _MISSING:
                space.pop("len", None)
            else:
                space["len"] = old


def free_length(x: Any) -> Any:
    """``len(x)``, of a tensor whose sizes are symbols a symbol."""
    return x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else len(x)


def _globals_of(module: nn.Module) -> list[dict[str, Any]]:
    """The names of the files that ``module`` and its parts are written in, each once."""
    found: dict[int, dict[str, Any]] = {}
    for part in module.modules():
        for kind in type(part).__mro__:
            forward = kind.__dict__.get("forward")
            space = getattr(inspect.unwrap(forward), "__globals__", None) if forward else None
            if space is None or str(space.get("__name__", "")).partition(".")[0] == "torch":
                continue
            if space.get("len", builtins.len) is builtins.len:
                found[id(space)] = space
    return list(found.values())
