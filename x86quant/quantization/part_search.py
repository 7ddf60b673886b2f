"""Which parts of a model become static int8 graphs: the outermost that are proved to be the same.

A part is a submodule, or the whole model. Each is traced by one way after another, and the first
graph that gives the part's own results is taken; where none does, its children are tried.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from x86quant.compiled.structure import CallForm
from x86quant.dynamic.convert import has_hooks
from x86quant.errors import UnsupportedError
from x86quant.quantization.batches import Call
from x86quant.quantization.proof import Observed, changing, observe, prove, run, state_kept
from x86quant.quantization.running import drop_hooks
from x86quant.quantization.scheme import Scheme, static_candidates
from x86quant.quantization.static_part import Ranges, StaticPart
from x86quant.quantization.tracing import WAYS, Traced, Way, trace
from x86quant.quantization.wording import first_line, listed

_log = logging.getLogger("x86quant.quantization")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundPart:
    """A part with an example of its calls, and why it was not traced by the first way."""

    path: str
    traced: Traced
    example: Call
    note: str

    def inputs(self, call: Call) -> Call | None:
        """The graph's inputs in a call of the part; None if the graph does not hold for it."""
        return self.traced.inputs(call)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The parts that were found, and what a user should know about the search."""

    found: tuple[FoundPart, ...]
    notes: tuple[str, ...]


def find_parts(
    model: nn.Module,
    scheme: Scheme,
    calls: Sequence[Call],
    ranges: Ranges,
    refused: Mapping[tuple[str, str], str] | None = None,
) -> Parts:
    """The outermost parts of ``model`` that can be static graphs.

    Args:
        model: a float model.
        scheme: what is wanted.
        calls: what the graphs are proved on.
        ranges: how they will be quantized.
        refused: for parts that turned out not to be possible, by path and way, the reason.
    """
    found: list[FoundPart] = []
    notes: list[str] = []
    with state_kept(model):
        changed = changing(model, calls[:1])
    if changed:
        notes.append(
            f"in float, because its buffers change: {listed(sorted(map(_shown, changed)))}"
        )
    called = {path for path, count in calls_of(model, calls[0]).items() if count}
    for path, module in static_candidates(model, scheme):
        if path not in called:
            continue
        if any(not f.path or path == f.path or path.startswith(f"{f.path}.") for f in found):
            continue
        reason = _outside(path, module, changed)
        if reason is None:
            try:
                found.append(_find(model, path, module, calls, ranges, refused or {}))
            except UnsupportedError as error:
                reason = str(error)
            else:
                if found[-1].note:
                    notes.append(found[-1].note)
        if reason is not None:
            _log.info("%s cannot be a graph: %s", path or "the model", reason)
            if not path and not scheme.dynamic:
                notes.append(f"the whole cannot be one graph: {reason}")
    if found and found[0].path:
        names = listed([f.path for f in found])
        notes.append(f"static parts: {names}; torch runs what is between")
    return Parts(tuple(found), tuple(notes))


def _shown(path: str) -> str:
    return path or "the model"


def _outside(path: str, module: nn.Module, changed: Collection[str]) -> str | None:
    """Why a graph cannot stand for ``module``, or None."""
    for name, inner in module.named_modules():
        inside = ".".join(filter(None, (path, name)))
        if inner is not module and has_hooks(inner):
            return f"{inside} has hooks"
        if inside in changed:
            return f"{_shown(inside)} changes its buffers"
        if type(inner).__call__ is not nn.Module.__call__:
            return f"{type(inner).__name__} has a __call__ of its own"
        if isinstance(inner, torch.jit.ScriptModule):
            return f"{_shown(inside)} is a ScriptModule"
    return None


def _find(
    model: nn.Module,
    path: str,
    module: nn.Module,
    calls: Sequence[Call],
    ranges: Ranges,
    refused: Mapping[tuple[str, str], str],
) -> FoundPart:
    """The part at ``path`` by the first way that holds.

    Raises:
        UnsupportedError: none does; says why.
    """
    with state_kept(model):
        seen = observe(model, path, calls)
    if not seen:
        raise UnsupportedError("it is not called")
    reasons: list[str] = []
    for way in WAYS:
        try:
            traced = _proved(module, path, seen, way)
            if (path, traced.method) in refused:
                raise UnsupportedError(refused[path, traced.method])
            example = Call(tuple(traced.tensors(_example(traced, seen))))
            StaticPart(path, traced, example, ranges)  # what stock prepare refuses shows here
        except UnsupportedError as error:
            reasons.append(str(error))
        else:
            return FoundPart(path, traced, example, "; ".join(reasons))
    raise UnsupportedError("; ".join(reasons))


def _example(traced: Traced, seen: Sequence[Observed]) -> Call:
    for one in seen:
        tensors = traced.form.tensors(one.call.args, one.call.kwargs)
        if tensors and traced.guard.refusal(tensors, traced.guard.compiled()) is None:
            return one.call
    raise UnsupportedError("no calibration batch meets what the graph had to assume")


def _proved(module: nn.Module, path: str, seen: Sequence[Observed], way: Way) -> Traced:
    example = seen[0].call
    try:
        traced = trace_part(path, module, example, way)
        return prove(module, traced, seen)
    except UnsupportedError:
        raise
    except TypeError as error:  # the arguments do not fit the signature
        raise UnsupportedError(first_line(error)) from error


def trace_part(path: str, module: nn.Module, example: Call, way: Way | None = None) -> Traced:
    """A copy of ``module`` as a graph; a single layer is called by its own name in it."""
    module = copy.deepcopy(module)
    drop_hooks(module)  # they are around the graph, not in it
    if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return trace(module, example, way)
    form, leaves = CallForm.of(module, example.args, example.kwargs)
    if len(leaves) != 1:
        raise UnsupportedError("it is called with more than one tensor")
    holder = _Holder(path.rpartition(".")[2] or "layer", module)
    return dataclasses.replace(trace(holder, Call(tuple(leaves)), way), form=form)


class _Holder(nn.Module):
    """Calls one layer by its own name, so that a tracer sees a call of it."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, layer)

    def forward(self, x: Any) -> Any:
        """The layer's result."""
        return self.get_submodule(self._name)(x)


def calls_of(model: nn.Module, call: Call) -> dict[str, int]:
    """How often each module is called when ``model`` runs on ``call``."""
    counts: dict[str, int] = {}
    handles = []

    def count(path: str) -> Any:
        def hook(*_: Any) -> None:
            counts[path] = counts.get(path, 0) + 1

        return hook

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(count(path)))
    try:
        run(model, call)
    finally:
        for handle in handles:
            handle.remove()
    return counts
