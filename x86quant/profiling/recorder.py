"""Runs a compiled model step by step, timing each, and says what every step is."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError
from x86quant.lowering.graph_tools import UNBOUNDED, Bounds, is_op, label, op_name
from x86quant.lowering.lower import FloatNode, computes_in_float
from x86quant.lowering.views import is_view
from x86quant.ops._register import FASTER
from x86quant.ops.dynamic import linear_dynamic
from x86quant.packing.linear_dynamic import cached_pack
from x86quant.routing.choice import Choice
from x86quant.routing.routes import Routes
from x86quant.runtime import Plan, Segment
from x86quant.runtime.plan import Step

#: The kernel of steps that torch runs in float, and of our own ops where they run in plain torch.
TORCH, PLAIN = "torch", "plain"

_ONLY_KERNEL = "the only kernel there is for it"
#: What a node may need beside its own step: codes laid out, expanded, requantized.
_HELPERS = frozenset({"copy", "requantize", "shuffle"})
_Shape = tuple[int, ...]
#: Of one torch op, or of all steps of a segment.
_Times = list[float | torch.Tensor]


@dataclasses.dataclass(frozen=True)
class RunStep:
    """One thing that a compiled model does.

    Attributes:
        name: the node of the graph.
        layer: what a user knows it by: a module of the source model, else the node.
        op: "conv", "linear", "add", "copy", or the name of a torch op.
        kernel: what runs it; "torch" for a float op.
        rule: what chose the kernel; empty where there is no choice.
        reason: why this kernel, or why it runs in float.
        inputs, output: shapes.
        multiply_adds: products it computes.
        activation_bytes: bytes of its inputs and its output.
        weight_bytes: bytes of its weights.
        fused: what it does besides its op, and the pass that put it there.
        choice: of a convolution or linear, the whole look-up.
        segment: the native segment it is part of; empty for what torch runs.
        parts: the parts of the batch it runs for, one after or beside another.
    """

    name: str
    layer: str
    op: str
    kernel: str
    rule: str
    reason: str
    inputs: tuple[_Shape, ...]
    output: _Shape
    multiply_adds: int = 0
    activation_bytes: int = 0
    weight_bytes: int = 0
    fused: tuple[str, ...] = ()
    choice: Choice | None = None
    segment: str = ""
    parts: int = 1

    @property
    def kind(self) -> str:
        """A coarse name to group by: "conv 3×3 s2", "depthwise 5×5", "linear", "add", …"""
        if self.choice is None:
            return f"{self.op} (float)" if self.kernel == TORCH else self.op
        spec = self.choice.spec
        if not spec.kernel:
            return spec.op
        name = "depthwise" if spec.depthwise else "grouped" if spec.groups > 1 else "conv"
        transposed = " transposed" if spec.transposed else ""
        stride = max(spec.stride)
        return f"{name}{transposed} {_by(spec.kernel)}" + (f" s{stride}" if stride > 1 else "")

    @property
    def shape(self) -> str:
        """Its shapes in one line."""
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        if self.choice is None:
            return f"{' + '.join(map(_by, self.inputs))} → {_by(self.output)}{parts}"
        spec = self.choice.spec.replace(rows=None)
        return f"{spec}: {_by(self.inputs[0])} → {_by(self.output)}{parts}"


@dataclasses.dataclass(frozen=True)
class Elided:
    """A node of the graph that needs no step: nothing runs for it."""

    name: str
    layer: str
    op: str
    reason: str


class Recorder:
    """Runs ``compiled`` on ``inputs``, timing its steps, by the path that a plain run takes.

    It has a copy of the graph in which segments and torch ops are replaced by what calls and times
    them; weights and plans are those of ``compiled``, which is not touched.
    """

    def __init__(
        self,
        compiled: CompiledModule,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._kwargs = dict(kwargs or {})
        values = (*inputs, *self._kwargs.values())
        if any(isinstance(x, torch.Tensor) and not x.numel() for x in values):
            raise InvalidInputError("an input is empty: nothing native runs for it")
        self._times: _Times = []
        self._calls: list[_TimedSegment | _TimedNode] = []
        self._inputs = tuple(inputs)
        self._timed = compiled.with_runtime(self._instrumented(compiled))

    def run(self) -> Any:
        """Run once more."""
        self._times.clear()
        return self._timed(*self._inputs, **self._kwargs)

    def times(self) -> list[float]:
        """Microseconds of every step of the last run, in order."""
        # Unpacked here and not while it runs: that would count as time between kernels.
        return [
            time
            for entry in self._times
            for time in (entry.tolist() if isinstance(entry, torch.Tensor) else [entry])
        ]

    def steps(self) -> tuple[RunStep, ...]:
        """What the steps of a run are; as many as ``times``."""
        return tuple(step for call in self._calls for step in call.steps())

    def plans(self) -> tuple[Plan, ...]:
        """The plans of the native segments, in order."""
        return tuple(call.plan for call in self._calls if isinstance(call, _TimedSegment))

    def _instrumented(self, compiled: CompiledModule) -> GraphModule:
        runtime = compiled.runtime
        segments = {segment.name: segment for segment in compiled.segments}
        graph, calls = Graph(), nn.Module()
        output = graph.graph_copy(runtime.graph, val_map={})
        originals = [node for node in runtime.graph.nodes if node.op != "output"]
        for index, (node, original) in enumerate(zip(graph.nodes, originals, strict=True)):
            call: _TimedSegment | _TimedNode
            if node.op == "call_module" and str(node.target) in segments:
                call = _TimedSegment(segments[str(node.target)], self._times)
            elif node.op.startswith("call_") and not _picks_an_item(node):
                call = _TimedNode(runtime, original, self._times)
            else:
                continue
            self._calls.append(call)
            calls.add_module(str(index), call)
            node.op, node.target = "call_module", f"_timed.{index}"
        graph.output(output)
        root = nn.Module()
        for name, buffer in runtime.named_buffers(recurse=False):
            root.register_buffer(name, buffer)
        root.add_module("_timed", calls)
        return GraphModule(root, graph, class_name="Timed").eval()


class _TimedSegment(nn.Module):
    """Runs a segment and notes the time of each step."""

    plan: Plan

    def __init__(self, segment: Segment, times: _Times) -> None:
        super().__init__()
        self._segment = segment
        self._times = times

    def forward(self, *inputs: Any) -> list[Any]:
        results, self.plan, times = self._segment.timed(*inputs)
        self._times.append(times)
        return results

    def steps(self) -> Iterator[RunStep]:
        nodes = {node.name: node for node in self._segment.graph_module.graph.nodes}
        for step, parts in zip(self.plan.steps, self.plan.parts_of_steps(), strict=True):
            yield _native_step(step, nodes[step.name], self._segment.name, parts)


class _TimedNode(nn.Module):
    """Runs a node that is in no segment, and notes its time if it computes tensors."""

    def __init__(self, runtime: GraphModule, node: Node, times: _Times) -> None:
        super().__init__()
        self._times = times
        self._call = _callable(runtime, node)
        self._describe = functools.partial(_torch_step, runtime, node)
        self._steps: list[RunStep] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = self._call(*args, **kwargs)
        elapsed = (perf_counter() - start) * 1e6
        if self._steps is None:
            outputs = _tensors(result)
            self._steps = [self._describe(args, kwargs, outputs)] if outputs else []
        if self._steps:
            self._times.append(elapsed)
        return result

    def steps(self) -> Iterator[RunStep]:
        return iter(self._steps or ())


def record(
    compiled: CompiledModule,
    inputs: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[tuple[RunStep, ...], tuple[Elided, ...]]:
    """The steps of ``compiled`` for ``inputs``, and what needs none.

    Without ``inputs`` it is run on zeros of the shapes it was compiled for.
    """
    if inputs is None and not kwargs:
        inputs, kwargs = example_call(compiled)
    recorder = Recorder(compiled, inputs or (), kwargs)
    with torch.no_grad():
        recorder.run()
    steps = recorder.steps()
    return steps, tuple(e for segment in compiled.segments for e in _elided(segment, steps))


def example_inputs(compiled: CompiledModule) -> tuple[torch.Tensor, ...]:
    """Zeros of the shapes that ``compiled`` was compiled for."""
    inputs = []
    for node in compiled.graph_module.graph.nodes:
        if node.op != "placeholder" or node.args:
            continue
        if node.meta.get("shape") is None or node.meta.get("input_dtype") is None:
            raise InvalidInputError(
                f"the shape of input {node.name!r} is not known; pass the inputs"
            )
        inputs.append(torch.zeros(node.meta["shape"], dtype=node.meta["input_dtype"]))
    return tuple(inputs)


def example_call(compiled: CompiledModule) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of the shapes that ``compiled`` was compiled for."""
    inputs = example_inputs(compiled)
    signature = getattr(compiled, "signature", None)  # of a saved model, which takes keywords
    return (inputs, {}) if signature is None else signature.example(inputs)


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
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[torch.Tensor],
) -> RunStep:
    op, kernel, reason = _run_by_torch(runtime, node)
    choice = _packed_choice(args, kwargs) if op == "linear_dynamic" and is_op(node) else None
    inputs = _tensors((args, kwargs))
    return RunStep(
        name=node.name,
        layer=label(node),
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


def _native_step(step: Step, node: Node, segment: str, parts: int) -> RunStep:
    def whole(shape: _Shape) -> _Shape:
        return (shape[0] * parts, *shape[1:]) if parts > 1 else shape

    choice = step.choice
    wanted = _called(node)
    helper = step.op in _HELPERS and step.op != wanted
    reason = f"moves codes for {wanted}" if helper else _ONLY_KERNEL
    return RunStep(
        name=step.name,
        layer=step.layer,
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
    if node.kwargs.get("lut") is not None:
        yield "table (fuse_table)"
    sources = dict.fromkeys(entry.source for entry in node.meta.get("absorbed", ()) if entry.source)
    if sources:
        yield f"no rounding of {', '.join(sources)}"


def _elided(segment: Segment, steps: Sequence[RunStep]) -> Iterator[Elided]:
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


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, which may be nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"
