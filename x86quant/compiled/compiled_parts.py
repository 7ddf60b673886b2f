"""The compiled graphs in a model, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from x86quant.compiled.block_graphs import blocks_of, token_step_of
from x86quant.compiled.guarded import GuardedModule
from x86quant.compiled.module import CompiledModule
from x86quant.errors import InvalidInputError


def whole_graph(model: object) -> CompiledModule | None:
    """The graph that does all that ``model`` does, for calls like its example; or None."""
    graph = model.compiled if isinstance(model, GuardedModule) else model
    return graph if isinstance(graph, CompiledModule) else None


def as_graph_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[CompiledModule, tuple[Any, ...], Mapping[str, Any]] | None:
    """The one graph that answers a call of ``model``, with its own arguments; None if none does.

    Raises:
        InvalidInputError: the model is one that has nothing but graphs, and none holds.
    """
    if isinstance(model, CompiledModule):
        return model, tuple(args), kwargs
    if not isinstance(model, GuardedModule):
        return None
    try:
        graph, tensors = model.graph_call(args, kwargs)
    except InvalidInputError:
        if model.original is None:
            raise
        return None
    return graph, tensors, {}


def compiled_parts(model: nn.Module) -> tuple[tuple[str, CompiledModule], ...]:
    """Every compiled graph that calls of ``model`` may run, and the path of what it stands for.

    Those are compiled modules, what is behind a guard, fused graphs at a module's forward, and the
    token step of a decoder.
    """
    found: dict[int, tuple[str, CompiledModule]] = {}
    for path, part in _parts(model, "", set()):
        found.setdefault(id(part), (path, part))
    return tuple(found.values())


def _parts(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, CompiledModule]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    inner = module
    if isinstance(module, CompiledModule):
        yield path, module
        inner = module.graph_module
    elif isinstance(module, GuardedModule):
        for graph in (module, *module.others):
            yield from _parts(graph.compiled, path, seen)
        return
    if (blocks := blocks_of(module)) is not None:
        for graph in blocks.graphs:
            yield path, graph.compiled
    if (step := token_step_of(module)) is not None:
        yield path, step.compiled
        if "on_codes" in vars(step):  # made for the first int8 cache
            yield path, step.on_codes
    for name, child in inner.named_children():
        yield from _parts(child, f"{path}.{name}" if path else name, seen)
