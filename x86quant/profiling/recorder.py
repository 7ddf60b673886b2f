"""Runs a compiled model step by step, timing each, and says what every step is."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from x86quant.compiler import CompiledModule
from x86quant.errors import InvalidInputError
from x86quant.lowering.graph_tools import UNBOUNDED, Bounds, is_op, label, op_name
from x86quant.lowering.lower import FloatNode, computes_in_float
from x86quant.router import Choice
from x86quant.runtime import Plan, Segment
from x86quant.runtime.plan import Step
from x86quant.runtime.supported import is_view

#: The kernel of steps that torch runs in float, and of our own ops where they run in plain torch.
TORCH, PLAIN = "torch", "plain"

_ONLY_KERNEL = "the only kernel there is for it"
#: What a node may need beside its own step: codes laid out, expanded, requantized.
_HELPERS = frozenset({"copy", "requantize", "shuffle"})
_Shape = tuple[int, ...]


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
        flow = f"{' + '.join(map(_by, self.inputs))} → {_by(self.output)}"
        if self.choice is None:
            return flow
        return f"{self.choice.spec.replace(rows=None)}: {_by(self.inputs[0])} → {_by(self.output)}"


@dataclasses.dataclass(frozen=True)
class Elided:
    """A node of the graph that needs no step: nothing runs for it."""

    name: str
    layer: str
    op: str
    reason: str


class Recorder(Interpreter):
    """One run of ``compiled``, step by step.

    Attributes:
        times: microseconds of every step, in order.
        steps: what they are, if ``describe``; then as many as ``times``.
        plans: of the native segments, by name.
    """

    def __init__(self, compiled: CompiledModule, *, describe: bool) -> None:
        super().__init__(compiled.runtime)
        self._segments = {segment.name: segment for segment in compiled.segments}
        self._describe = describe
        self.times: list[float] = []
        self.steps: list[RunStep] = []
        self.plans: dict[str, Plan] = {}

    def run_node(self, n: Node) -> Any:
        """Run ``n``; what computes tensors is a step."""
        if n.op in ("placeholder", "get_attr", "output") or self._takes_a_result(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        segment = self._segment_of(n)
        if segment is not None:
            return self._run_segment(segment, args)
        start = perf_counter()
        result = getattr(self, n.op)(n.target, args, kwargs)
        elapsed = (perf_counter() - start) * 1e6
        if _tensors(result):
            self.times.append(elapsed)
            if self._describe:
                self.steps.append(self._torch_step(n, _tensors((args, kwargs)), _tensors(result)))
        return result

    def _segment_of(self, node: Node) -> Segment | None:
        return self._segments.get(str(node.target)) if node.op == "call_module" else None

    def _takes_a_result(self, node: Node) -> bool:
        """Whether ``node`` takes one of a segment's results."""
        return (
            node.target is operator.getitem
            and isinstance(node.args[0], Node)
            and self._segment_of(node.args[0]) is not None
        )

    def _run_segment(self, segment: Segment, args: Sequence[Any]) -> list[Any]:
        results, plan, times = segment.timed(*args)
        self.times += times
        self.plans[segment.name] = plan
        if self._describe:
            nodes = {node.name: node for node in segment.graph_module.graph.nodes}
            self.steps += [_native_step(s, nodes[s.name], segment.name) for s in plan.steps]
        return results

    def _torch_step(
        self, node: Node, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> RunStep:
        assert isinstance(self.module, GraphModule)
        op, kernel, reason = _run_by_torch(self.module, node)
        return RunStep(
            name=node.name,
            layer=label(node),
            op=op,
            kernel=kernel,
            rule="",
            reason=reason,
            inputs=tuple(tuple(x.shape) for x in inputs),
            output=tuple(outputs[0].shape),
            activation_bytes=sum(x.nbytes for x in inputs + outputs),
        )


def record(
    compiled: CompiledModule, inputs: Sequence[Any] | None
) -> tuple[tuple[RunStep, ...], tuple[Elided, ...], dict[str, Plan]]:
    """The steps of ``compiled`` for ``inputs``, what needs none, and the plans of its segments.

    Without ``inputs`` it is run on zeros of the shapes it was compiled for.
    """
    given = example_inputs(compiled) if inputs is None else tuple(inputs)
    with torch.no_grad():
        compiled(*given)  # checks the inputs
        recorder = Recorder(compiled, describe=True)
        recorder.run(*given)
    elided = (e for segment in compiled.segments for e in _elided(segment, recorder.steps))
    return tuple(recorder.steps), tuple(elided), recorder.plans


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


def _run_by_torch(module: GraphModule, node: Node) -> tuple[str, str, str]:
    """Op, kernel and reason of a node that is in no native segment."""
    if is_op(node):
        return op_name(node), PLAIN, "no native form of it here: it runs as plain torch"
    as_float = FloatNode.of(module, node)
    if computes_in_float(node):
        return as_float.op, TORCH, f"torch float op: {as_float.reason}"
    return as_float.op, TORCH, "moves data between torch ops"


def _native_step(step: Step, node: Node, segment: str) -> RunStep:
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
        inputs=tuple(value.shape for value in step.inputs),
        output=step.output.shape,
        multiply_adds=step.multiply_adds,
        activation_bytes=step.moved_bytes - step.weight_bytes,
        weight_bytes=step.weight_bytes,
        fused=() if helper else tuple(_fused(node)),
        choice=choice,
        segment=segment,
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
