"""A plan in the making: values, the buffers they lie in, and the steps so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import attribute, label
from x86quant.runtime import layout
from x86quant.runtime.cat_placement import Placement, place_cats
from x86quant.runtime.copying import copying
from x86quant.runtime.memory import assign_offsets
from x86quant.runtime.native_step import NativeStep
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import Buffer, Step, Value


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
        self, node: Node, order: Sequence[int], dtype: torch.dtype = torch.uint8
    ) -> Value:
        """Where ``node`` writes: its part of a concatenation, an output, or a buffer of its own."""
        placement = self.placements.get(node)
        if placement is not None:
            whole = self.cat_buffer(placement.cat)
            if layout.order_of(whole.meta)[-1] == order[-1]:
                part = whole.meta.narrow(placement.dim, placement.start, placement.size)
                return Value(whole.buffer, part)
            del self.placements[node]  # it writes what is not adjacent there: it is copied
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
        order = layout.channels_last_order(value.meta.dim())
        if value.meta.dim() < 4:
            order = list(range(value.meta.dim()))
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
