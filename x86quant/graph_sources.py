"""The sources of graphs that are gone, which torch.fx would keep for as long as the process runs.

torch.fx notes the Python of each graph that it makes, for tracebacks and debuggers, and never
forgets one: a service that loads a model again and again would grow.
"""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, graph_module

#: Notes that were made within blocks of ours, and whose graphs were there when last looked at.
_noted: set[str] = set()


@contextlib.contextmanager
def forgotten_with_their_graphs() -> Iterator[None]:
    """A block after which torch.fx keeps no source of a graph that was made in such a block before
    and is gone.
    """
    notes = _notes()
    before = set(notes)
    try:
        yield
    finally:
        # Those of this block stay for one more: another thread may be about to use one.
        gone = _noted - {name for made in _classes(GraphModule) if (name := _source(made))}
        for name in gone:
            notes.pop(name, None)
            linecache.cache.pop(name, None)
        _noted.difference_update(gone)
        _noted.update(notes.keys() - before)


def _notes() -> dict[str, str]:
    """Of torch.fx, by the file name that their code has; none where torch keeps them elsewhere."""
    found: Any = getattr(getattr(graph_module, "_loader", None), "eval_cache", None)
    return found if isinstance(found, dict) else {}


def _classes(of: type) -> Iterator[type]:
    """What is made of this class: each graph has one of its own."""
    made: type
    for made in of.__subclasses__():
        yield made
        yield from _classes(made)


def _source(graph_class: type) -> str | None:
    code = getattr(graph_class.__dict__.get("forward"), "__code__", None)
    return getattr(code, "co_filename", None)
