"""A compiled graph whose segments and torch ops tell a run log how long each step took."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.compiled import CompiledModule
from x86quant.lowering.graph_tools import UNBOUNDED, Bounds, is_op, label, op_name
from x86quant.lowering.lower import FloatNode, computes_in_float
from x86quant.lowering.views import is_view
from x86quant.ops._register import FASTER
from x86quant.ops.dynamic import linear_dynamic
from x86quant.packing.linear_dynamic import cached_pack
from x86quant.profiling.run_log import RunLog
from x86quant.profiling.run_step import PLAIN, TORCH, Elided, RunStep, tensors_in, within
from x86quant.routing.routes import Choice, Routes
from x86quant.runtime import Segment
from x86quant.runtime.plan import Step

_ONLY_KERNEL = "the only kernel there is for it"
#: What a node may need beside its own step: codes laid out, expanded, requantized.
_HELPERS = frozenset({"copy", "requantize", "shuffle"})
_Shape = tuple[int, ...]


def timed_graph(compiled: CompiledModule, path: str, log: RunLog) -> GraphModule:
    """What ``compiled`` runs, with weights and plans of its own, timing each step.

    Segments and torch ops are replaced by what calls and times them.

    Args:
        compiled: is not touched.
        path: where it is in the model: a prefix of its layers' names.
        log: what is told.
    """
    runtime = compiled.runtime
    segments = {segment.name: segment for segment in compiled.segments}
    graph, calls = Graph(), nn.Module()
    output = graph.graph_copy(runtime.graph, val_map={})
    originals = [node for node in runtime.graph.nodes if node.op != "output"]
    for index, (node, original) in enumerate(zip(graph.nodes, originals, strict=True)):
        if node.op == "call_module" and str(node.target) in segments:
            call: nn.Module = _TimedSegment(segments[str(node.target)], path, log)
        elif node.op.startswith("call_") and not _picks_an_item(node):
            call = _TimedNode(runtime, original, path, log)
        else:
            continue
        calls.add_module(str(index), call)
        node.op, node.target = "call_module", f"_timed.{index}"
    graph.output(output)
    root = nn.Module()
    for name, buffer in runtime.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    root.add_module("_timed", calls)
    timed = GraphModule(root, graph, class_name="Timed").eval()
    timed.forward = functools.partial(log.within_graph, timed, timed.forward)
    return timed


class _TimedSegment(nn.Module):
    """Runs a segment and notes the time of each step."""

    def __init__(self, segment: Segment, path: str, log: RunLog) -> None:
        super().__init__()
        self._segment = segment
        self._path = path
        self._log = log
        self._nodes = {node.name: node for node in segment.graph_module.graph.nodes}

    def forward(self, *inputs: Any) -> Sequence[Any]:
        log = self._log
        if not log.listens() or not self._segment.can_plan(inputs):
            results: Sequence[Any] = self._segment(*inputs)
            return results
        results, plan, times = self._segment.timed(*inputs)
        log.add(times)
        if log.describes:
            log.plans.append(plan)
            for step, parts in zip(plan.steps, plan.parts_of_steps(), strict=True):
                node = self._nodes[step.name]
                log.steps.append(_native_step(step, node, self._segment.name, parts, self._path))
        return results


class _TimedNode(nn.Module):
    """Runs a node that is in no segment, and notes its time if it computes tensors."""

    def __init__(self, runtime: GraphModule, node: Node, path: str, log: RunLog) -> None:
        super().__init__()
        self._log = log
        self._call = _callable(runtime, node)
        self._describe = functools.partial(_torch_step, runtime, node, path)
        self._computes: bool | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        log = self._log
        if not log.listens():
            return self._call(*args, **kwargs)
        entries = log.entries
        start = perf_counter()
        result = self._call(*args, **kwargs)
        elapsed = (perf_counter() - start) * 1e6
        if self._computes is None:
            self._computes = bool(tensors_in(result))
        if self._computes and log.entries == entries:  # else what it called noted steps itself
            log.add(elapsed)
            if log.describes:
                log.steps.append(self._describe(args, kwargs, tensors_in(result)))
        return result


def _callable(runtime: GraphModule, node: Node) -> Callable[..., Any]:
    """What ``node`` calls with its arguments."""
    if node.op == "call_module":
        return runtime.get_submodule(str(node.target))
    if node.op == "call_method":
        name = str(node.target)
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    assert callable(node.target)
    return node.target


def _torch_step(
    runtime: GraphModule,
    node: Node,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
) -> RunStep:
    op, kernel, reason = _run_by_torch(runtime, node)
    choice = _packed_choice(args, kwargs) if op == "linear_dynamic" and is_op(node) else None
    inputs = tensors_in((args, kwargs))
    return RunStep(
        name=node.name,
        layer=within(path, label(node)),
        op=op,
        kernel=kernel if choice is None else choice.kernel,
        rule="" if choice is None else choice.rule,
        reason=reason if choice is None else choice.reason,
        inputs=tuple(tuple(x.shape) for x in inputs),
        output=tuple(outputs[0].shape),
        activation_bytes=sum(x.nbytes for x in inputs + outputs),
        choice=choice,
    )


def _packed_choice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice | None:
    """Which kernel ran a ``linear_dynamic``, whose op packs its weights by itself."""
    given = inspect.signature(linear_dynamic).bind(*args, **kwargs).arguments
    x = given.pop("x")
    pack = cached_pack(**{"bias": None, "activation": None, **given})
    if pack is None:
        return None
    return Routes.from_json(pack.record()).choice_for(x.numel() // max(x.shape[-1], 1))


def _run_by_torch(module: GraphModule, node: Node) -> tuple[str, str, str]:
    """Op, kernel and reason of a node that is in no native segment."""
    if is_op(node, "linear_dynamic", "linear_weight_only"):
        return op_name(node), "native", "int8 weights packed for this CPU at the first run"
    if is_op(node, "embedding_bags", "embedding_rows"):
        return op_name(node), "native", "looks up and sums quantized rows"
    if is_op(node, "interact"):
        return op_name(node), "native", "products of a sample's vectors, in float"
    if is_op(node) and op_name(node) in FASTER:
        return op_name(node), "native", "what its op needs is packed at the first run"
    if is_op(node):
        return op_name(node), PLAIN, "no native form of it here: it runs as plain torch"
    as_float = FloatNode.of(module, node)
    if computes_in_float(node):
        return as_float.op, TORCH, f"torch float op: {as_float.reason}"
    return as_float.op, TORCH, "moves data between torch ops"


def _native_step(step: Step, node: Node, segment: str, parts: int, path: str) -> RunStep:
    def whole(shape: _Shape) -> _Shape:
        return (shape[0] * parts, *shape[1:]) if parts > 1 else shape

    choice = step.choice
    wanted = _called(node)
    helper = step.op in _HELPERS and step.op != wanted
    reason = f"moves codes for {wanted}" if helper else _ONLY_KERNEL
    return RunStep(
        name=step.name,
        layer=within(path, step.layer),
        op=step.op,
        kernel=step.kernel,
        rule="" if choice is None else choice.rule,
        reason=reason if choice is None else choice.reason,
        inputs=tuple(whole(value.shape) for value in step.inputs),
        output=whole(step.output.shape),
        multiply_adds=step.multiply_adds * parts,
        activation_bytes=(step.moved_bytes - step.weight_bytes) * parts,
        weight_bytes=step.weight_bytes,
        fused=() if helper else tuple(_fused(node)),
        choice=choice,
        segment=segment,
        parts=parts,
    )


def _fused(node: Node) -> Iterator[str]:
    """What a node's op does besides, each with the pass that put it there."""
    bounds: Bounds = node.meta.get("bounds", UNBOUNDED)
    codes = (node.kwargs.get("lo", 0), node.kwargs.get("hi", 255))
    if bounds != UNBOUNDED:
        low, high = ("" if bound is None else f"{bound:g}" for bound in bounds)
        yield f"clamp {low}..{high} (fuse_clamp)"
    elif codes != (0, 255):
        yield f"clamp to codes {codes[0]}..{codes[1]} (fuse_clamp)"
    residual = node.kwargs.get("residual")
    if isinstance(residual, Node):
        yield f"sum with {label(residual)} (fuse_residual)"
    if node.kwargs.get("slopes") is not None:
        yield "slopes of what is below zero (lower_sloped)"
    if node.kwargs.get("lut") is not None:
        yield "table (fuse_table)"
    sources = dict.fromkeys(entry.source for entry in node.meta.get("absorbed", ()) if entry.source)
    if sources:
        yield f"no rounding of {', '.join(sources)}"


def elided(segment: Segment, steps: Sequence[RunStep]) -> Iterator[Elided]:
    """The nodes of ``segment`` for which none of ``steps`` ran."""
    ran = {step.name for step in steps if step.segment == segment.name}
    for node in segment.graph_module.graph.nodes:
        if not node.op.startswith("call_") or node.name in ran:
            continue
        if is_op(node):
            yield Elided(node.name, label(node), _called(node), "its inputs are written in place")
        elif is_view(node) and not _picks_an_item(node):
            yield Elided(node.name, label(node), _called(node), "a view: no copy")


def _picks_an_item(node: Node) -> bool:
    """Whether ``node`` takes one of several results."""
    return node.target is operator.getitem and isinstance(node.args[1], int)


def _called(node: Node) -> str:
    return op_name(node) if is_op(node) else str(getattr(node.target, "__name__", node.target))
