"""A plan in the making: values, the buffers they lie in, and the steps so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.graph_tools import attribute, is_op, label
from x86quant.runtime import layout
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import Buffer, Step, Value, assign_offsets
from x86quant.runtime.programs import NativeStep, NativeTensor, rows_of


class Draft:
    """What the native forms of ops add their steps to.

    Attributes:
        root: the graph.
        shapes: of every node; what is no tensor stands for itself.
        packs: the packed weights.
        threads: how many the plan is for.
        placements: which nodes write straight into a concatenation.
        steps, native_steps: what the plan does, as it prints and as the extension takes it.
        buffers: those the draft has made.
        is_part: whether it is of a part of a batch, which others follow.
    """

    def __init__(
        self,
        root: GraphModule,
        shapes: dict[Node, Any],
        packs: Packs,
        threads: int,
        tensors: int,
        open_inputs: Sequence[Node] = (),
        *,
        is_part: bool = False,
    ) -> None:
        self.root = root
        self.shapes = shapes
        self.packs = packs
        self.threads = threads
        self.placements: dict[Node, Placement] = place_cats(root.graph, shapes)
        self.steps: list[Step] = []
        self.native_steps: list[NativeStep] = []
        self.buffers: list[Buffer] = []
        self._values: dict[Node, Any] = {}
        self._output_nodes: list[Node] = list([*root.graph.nodes][-1].args[0])
        self._tensors = tensors
        self.is_part = is_part
        self._open_inputs = list(open_inputs)
        self._results: list[Any] | None = None

    # ---------------------------------------------------------------- values and buffers

    def __getitem__(self, node: Node) -> Any:
        """The value of ``node``: a ``Value``, a number, or a tuple of such."""
        return self._values[node]

    def __setitem__(self, node: Node, value: Any) -> None:
        self._values[node] = value

    def value(self, node: Any) -> Value:
        """The tensor that is an argument of a node."""
        value: Value = self._values[node]
        return value

    def table(self, node: Node, name: str) -> torch.Tensor:
        """The constant that is an argument of ``node``."""
        constant: Any = node.kwargs[name]
        table: torch.Tensor = attribute(self.root, str(constant.target))
        return table

    def new(self, name: str, meta: torch.Tensor, base: int = 0) -> Value:
        """A value in a buffer of its own."""
        nbytes = meta.untyped_storage().nbytes()
        first = len(self.steps)
        buffer = Buffer(name, nbytes, first, first, base)
        self.buffers.append(buffer)
        return Value(buffer, meta)

    def output_of(
        self,
        node: Node,
        order: Sequence[int],
        dtype: torch.dtype = torch.uint8,
        *,
        without_gaps: bool = False,
    ) -> Value:
        """Where ``node`` writes: its part of a concatenation, an output, or a buffer of its own.

        ``without_gaps`` is for what writes one pixel behind the other: no part with the lines of
        others between its own.
        """
        placement = self.placements.get(node)
        if placement is not None:
            whole = self.cat_buffer(placement.cat)
            fits = not without_gaps or placement.dim in (order[0], order[-1])
            if fits and layout.order_of(whole.meta)[-1] == order[-1]:
                part = whole.meta.narrow(placement.dim, placement.start, placement.size)
                return Value(whole.buffer, part)
            del self.placements[node]  # it cannot write there: it is copied
        base = 0
        if node in self._output_nodes:
            base = self._base_of_output(node)
            if self.is_part:  # the next part follows this one
                order = [0, *(i for i in order if i != 0)]
        return self.new(node.name, layout.like(self.shapes[node], order, dtype), base)

    def leaves(self, node: Node) -> bool:
        """Whether the value of ``node`` is one of the graph's outputs."""
        return node in self._output_nodes

    def is_open(self, node: Node) -> bool:
        """Whether ``node`` is an input of any number of elements."""
        return node in self._open_inputs

    def open_size(self, node: Node) -> Value | None:
        """Where steps find the number of elements of an open input: behind the outputs."""
        if not self.is_open(node):
            return None
        outputs = sum(isinstance(self.shapes[n], torch.Size) for n in self._output_nodes)
        sizes = torch.empty(len(self._open_inputs), dtype=torch.int64, device="meta")
        buffer = Buffer("sizes", 0, 0, 0, base=1 + self._tensors + outputs)
        return Value(buffer, sizes[self._open_inputs.index(node)])

    def is_input(self, value: Value) -> bool:
        """Whether ``value`` is an input of the graph, or part of one."""
        return 1 <= value.buffer.base <= self._tensors

    def _base_of_output(self, node: Node) -> int:
        """Outputs that are tensors come after the arena and the inputs."""
        before = self._output_nodes[: self._output_nodes.index(node)]
        number = sum(isinstance(self.shapes[n], torch.Size) for n in before)
        return 1 + self._tensors + number

    def cat_buffer(self, cat: Node) -> Value:
        """Where the result of a concatenation lies."""
        if cat not in self._values:
            order = layout.channels_last_order(len(self.shapes[cat]))
            self._values[cat] = self.output_of(cat, order)
        return self.value(cat)

    def results(self) -> list[Any]:
        """The graph's outputs, each copied to a buffer that leaves the segment if need be."""
        if self._results is None:
            self._results = [self._result(node) for node in self._output_nodes]
        return self._results

    def _result(self, node: Node) -> Any:
        value = self._values[node]
        if not isinstance(value, Value):
            return value
        base = self._base_of_output(node)
        if value.buffer.base == base:
            return value
        order = list(range(value.meta.dim()))
        if value.meta.dim() >= 4 and not layout.are_rows(value.meta):
            order = layout.channels_last_order(value.meta.dim())
        target = layout.like(value.shape, order, value.meta.dtype)
        return self.copy(node, value, self.new(node.name, target, base))

    def lay_out(self) -> int:
        """Give the arena's buffers their places; the size of the arena."""
        return assign_offsets([buffer for buffer in self.buffers if buffer.base == 0])

    # ---------------------------------------------------------------- steps

    def add(
        self,
        node: Node,
        step: NativeStep,
        inputs: Sequence[Value],
        output: Value,
        op: str | None = None,
        others: Sequence[Value] = (),
        **facts: Any,
    ) -> Value:
        """Append ``step``, which reads ``inputs`` and writes ``output``, and return the latter.

        Args:
            node: what it is done for.
            step: as the extension takes it.
            inputs: every value it reads, so that their memory lasts.
            output: the value it writes.
            op: its name in reports, where that is not the step's kind.
            others: further values that it writes.
            facts: further attributes of ``Step``.
        """
        index = len(self.steps)
        for value in (*inputs, output, *others):
            buffer = value.buffer
            buffer.first = min(buffer.first, index)
            buffer.last = index  # steps come in order
        name = op or step.kind
        self.steps.append(
            Step(node.name, label(node), name, tuple(inputs), output, tuple(others), **facts)
        )
        self.native_steps.append(step)
        return output

    def copy(self, node: Node, source: Value, target: Value) -> Value:
        """Copy codes between tensors of one shape, whatever their strides."""
        step = copying(source, target)
        op = "copy" if step.kind == "strided_copy" else None
        return self.add(node, step, [source], target, op)

    def with_channels_adjacent(self, node: Node, value: Value, channel: int) -> Value:
        """``value`` itself, or a copy whose dimension ``channel`` is innermost."""
        if layout.fits(value.meta, channel):
            return value
        rank = value.meta.dim()
        order = [i for i in range(rank) if i != channel % rank] + [channel % rank]
        return self.copy(
            node, value, self.new(node.name, layout.like(value.shape, order, value.meta.dtype))
        )


# -------------------------------------------------- what is written straight into a concatenation


@dataclasses.dataclass(frozen=True)
class Placement:
    """A node's result is ``cat.narrow(dim, start, size)``."""

    cat: Node
    dim: int
    start: int
    size: int


def place_cats(graph: Graph, shapes: Mapping[Node, Any]) -> dict[Node, Placement]:
    """The placement of every node that can have one.

    An input of a concatenation is placed when an op of the segment makes it, its qparams are
    those of the result, and no earlier concatenation has it already.
    """
    placements: dict[Node, Placement] = {}
    for cat in graph.nodes:
        if cat.op != "call_function" or not is_op(cat, "cat"):
            continue
        kwargs: Any = cat.kwargs
        dim = kwargs["dim"] % len(shapes[cat])
        start = 0
        for x, *qparams in zip(kwargs["xs"], kwargs["x_scales"], kwargs["x_zps"], strict=True):
            size = shapes[x][dim]
            same = qparams == [kwargs["out_scale"], kwargs["out_zp"]]
            once = kwargs["xs"].count(x) == 1
            if same and once and size and is_op(x) and x not in placements:
                placements[x] = Placement(cat, dim, start, size)
            start += size
    return placements


# ---------------------------------------------------------------------------------------- copies


def copying(source: Value, target: Value) -> NativeStep:
    """A copy, whatever the strides of the two; the quickest that can do it."""
    return _quick(source, target) or _strided(source, target)


def _quick(source: Value, target: Value) -> NativeStep | None:
    if source.meta.dtype != torch.uint8 or source.meta.dim() == 0:
        return None
    innermost = layout.order_of(target.meta)[-1]
    if layout.fits(source.meta, innermost) and layout.fits(target.meta, innermost):
        if layout.rows([source.meta, target.meta], innermost) is None:
            return None
        return NativeStep("copy", rows_of([source], target, innermost))
    return _shuffling(source, target)


#: So many are transposed by tiles, which is quicker than code by code.
_MANY_GROUPS = 16


def _shuffling(source: Value, target: Value) -> NativeStep | None:
    """Channels that are groups of adjacent codes in ``source``, interleaved in ``target``."""
    axes = [i for i in layout.order_of(target.meta) if target.meta.shape[i] != 1]
    if len(axes) < 2:
        return None
    within, group = axes[-2:]
    each, groups = target.meta.shape[within], target.meta.shape[group]
    if groups >= _MANY_GROUPS:
        return None
    strides = [(m.stride(within), m.stride(group)) for m in (source.meta, target.meta)]
    if strides != [(1, each), (groups, 1)]:
        return None
    rest = [i for i in range(target.meta.dim()) if i not in (within, group)]
    joined = [_joined(m, rest, each * groups) for m in (source.meta, target.meta)]
    rows = layout.rows(joined, -1)
    if rows is None:
        return None
    a, out = NativeTensor(source, *rows[0]), NativeTensor(target, *rows[1])
    return NativeStep("shuffle", {"a": a, "out": out, "groups": groups})


def _joined(meta: torch.Tensor, rest: Sequence[int], channels: int) -> torch.Tensor:
    """``meta`` with two of its dimensions as one, the last."""
    return torch.empty_strided(
        [*(meta.shape[i] for i in rest), channels],
        [*(meta.stride(i) for i in rest), 1],
        dtype=meta.dtype,
        device="meta",
    )


def _strided(source: Value, target: Value) -> NativeStep:
    size = source.meta.element_size()
    fields = {
        "element_size": size,
        "sizes": list(source.shape),
        "from": source,
        "from_strides": [stride * size for stride in source.meta.stride()],
        "to": target,
        "to_strides": [stride * size for stride in target.meta.stride()],
    }
    return NativeStep("strided_copy", fields)
