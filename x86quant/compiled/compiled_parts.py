"""The compiled graphs in a model, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from x86quant.compiled.block_graphs import blocks_of, token_step_of
from x86quant.compiled.guarded import GuardedModule
from x86quant.compiled.module import CompiledModule


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
        yield from _parts(module.compiled, path, seen)
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
