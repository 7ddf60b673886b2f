"""Nodes that are more than a function of tensors: shapes, constants, branches, loops, codes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.onnx_models.graph_building import GraphBuilder, maker
from x86quant.onnx_models.node_view import NodeView
from x86quant.onnx_models.operators.quantized_ops import check_scale, quantize_linear
from x86quant.onnx_models.size_values import Extents

if TYPE_CHECKING:
    from onnx import GraphProto


@maker("Constant")
def constant(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A value of the file."""
    for name, value in seen.attributes.items():
        if name == "value" and isinstance(value, torch.Tensor):
            return [value]
        if name in ("value_int", "value_ints"):
            return [torch.tensor(value, dtype=torch.int64)]
        if name in ("value_float", "value_floats"):
            return [torch.tensor(value, dtype=torch.float32)]
        raise seen.refusal(f"a constant by {name}")
    raise seen.refusal("a constant without a value")


@maker("Dropout")
def dropout(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """Refused in training; the table knows what else there is."""
    training = builder.known[seen.inputs[2]] if len(seen.inputs) > 2 else None
    if isinstance(training, Node) or (training is not None and bool(training)):
        raise seen.refusal("it may drop values at random, as in training")
    return None


@maker("Resize")
def resize(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """Refused where ONNX's definition and ONNX Runtime differ; the table knows the others."""
    scales = builder.known[seen.inputs[2]] if len(seen.inputs) > 2 else None
    known = builder.types.of(seen.inputs[0])
    corners = seen.attributes.get("coordinate_transformation_mode") == "align_corners"
    if corners and isinstance(scales, Node):
        raise seen.refusal("by the corners, with scales that are computed; give sizes instead")
    if not corners or not isinstance(scales, torch.Tensor) or known is None:
        return None
    sizes = (known.sizes or []) if seen.attributes.get("axes") is None else []
    pairs = zip(sizes, scales.tolist(), strict=False)
    if any(size is not None and size * scale != int(size * scale) for size, scale in pairs):
        raise seen.refusal(
            f"by the corners of {list(sizes)} to sizes that are no whole numbers, where ONNX and "
            "ONNX Runtime differ; give sizes instead of scales"
        )
    return None


@maker("Shape")
def shape(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """Extents that are followed one by one, where their number is known."""
    items = _sizes(builder, seen)
    if items is None:
        return None
    return [Extents(tuple(items[seen.attributes.get("start", 0) : seen.attributes.get("end")]))]


@maker("Size")
def size(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """The product of sizes."""
    items = _sizes(builder, seen)
    if items is None or any(isinstance(item, Node) for item in items):
        return None
    total = 1
    for item in items:
        total *= item
    return [Extents((total,), True)]


def _sizes(builder: GraphBuilder, seen: NodeView) -> list[Any] | None:
    value = builder.known[seen.inputs[0]]
    if isinstance(value, Extents):
        return [] if value.scalar else [len(value.items)]
    known = builder.types.of(seen.inputs[0])
    if not isinstance(value, Node) or known is None or known.sizes is None:
        return None
    return [
        builder.size(value, n) if fixed is None else fixed for n, fixed in enumerate(known.sizes)
    ]


class Branches(nn.Module):
    """One of two graphs, by a condition that is known when it runs."""

    def __init__(self, chosen: GraphModule, otherwise: GraphModule) -> None:
        super().__init__()
        self.chosen = chosen
        self.otherwise = otherwise

    def forward(self, condition: torch.Tensor, *values: torch.Tensor) -> Any:
        """The results of the branch taken."""
        return self.chosen(*values) if bool(condition) else self.otherwise(*values)


@maker("If")
def branch(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """The branch that is taken, if that is known; else both, in a layer that chooses."""
    condition = builder.known[seen.inputs[0]]
    graphs = [seen.attributes["then_branch"], seen.attributes["else_branch"]]
    if isinstance(condition, torch.Tensor):
        if condition.numel() != 1:
            raise seen.refusal("its condition is not one value")
        outside = dict(builder.known)
        try:
            return builder.run(graphs[0] if bool(condition) else graphs[1])
        finally:
            builder.known = outside
    captured = sorted(set(_outer(builder, graphs[0])) | set(_outer(builder, graphs[1])))
    made = [inner_graph(builder, graph, captured, []) for graph in graphs]
    values = [builder.known[name] for name in captured]
    node = builder.layer(Branches(*made), seen, condition, *values)
    for proto, name in zip(graphs[0].output, seen.outputs, strict=False):
        if name:
            builder.types.declare(_renamed(proto, name))
    return builder.several(node, seen.outputs)


def _renamed(proto: Any, name: str) -> Any:
    copy = type(proto)()
    copy.CopyFrom(proto)
    copy.name = name
    return copy


def _outer(builder: GraphBuilder, graph: GraphProto) -> list[str]:
    """The computed values of around that ``graph`` reads."""
    computed = (Node, Extents, list)
    return [n for n in names_read(graph) if isinstance(builder.known.get(n), computed)]


def names_read(graph: GraphProto) -> list[str]:
    """The values of around that ``graph`` reads."""
    own = {one.name for one in itertools.chain(graph.input, graph.initializer)}
    found: list[str] = []
    for node in graph.node:
        inner = [name for a in node.attribute if a.HasField("g") for name in names_read(a.g)]
        found += [name for name in (*node.input, *inner) if name and name not in own]
        own |= set(node.output)
    found += [one.name for one in graph.output if one.name not in own]
    return found


def inner_graph(
    builder: GraphBuilder, graph: GraphProto, captured: Sequence[str], inputs: Sequence[str]
) -> GraphModule:
    """A module of ``inputs`` and of the values ``captured`` around it."""
    inner = GraphBuilder(builder.file, builder.opsets, keeps_rounding=builder.keeps_rounding)
    inner.uses = builder.uses
    inner.types = builder.types
    inner.known |= {k: v for k, v in builder.known.items() if isinstance(v, torch.Tensor)}
    declared = {one.name: one for one in graph.input}
    for name in (*inputs, *captured):
        if name in declared:
            inner.types.declare(declared[name])
        inner.known[name] = inner.graph.placeholder(inner.free_name(name))
    return inner.finish(inner.run(graph), always_tuple=True)


class Loops(nn.Module):
    """A graph that runs again and again."""

    def __init__(self, body: GraphModule, carried: int) -> None:
        super().__init__()
        self.body = body
        self.carried = carried

    def forward(self, most: Any, condition: Any, *values: Any) -> Any:
        """The values carried to the end, and those that each run gave, stacked."""
        state, captured = list(values[: self.carried]), values[self.carried :]
        limit = None if most is None else int(most)
        runs, number = True if condition is None else bool(condition), 0
        collected: list[list[torch.Tensor]] = []
        while runs and (limit is None or number < limit):
            again, *results = self.body(
                torch.tensor(number, dtype=torch.int64),
                torch.tensor(runs, dtype=torch.bool),
                *state,
                *captured,
            )
            state = results[: self.carried]
            collected.append(results[self.carried :])
            runs, number = bool(again), number + 1
        if not collected:
            given: Any = self.body.graph.output_node().args[0]
            if len(given) > 1 + self.carried:
                raise ValueError("a loop that ran not once has no results to stack")
            return tuple(state)
        return (*state, *(torch.stack(one) for one in zip(*collected, strict=True)))


@maker("Loop")
def loop(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A loop as a layer that runs its body."""
    body = seen.attributes["body"]
    most, condition, *state = [builder.known[name] for name in seen.inputs]
    captured = sorted(set(_outer(builder, body)))
    inner = inner_graph(builder, body, captured, [one.name for one in body.input])
    values = [builder.known[name] for name in captured]
    node = builder.layer(Loops(inner, len(state)), seen, most, condition, *state, *values)
    return builder.several(node, seen.outputs)


@maker("QuantizeLinear", "DequantizeLinear")
def codes(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """Codes as they are; or, where the file's rounding is not kept, what was rounded to them."""
    values = [builder.known[name] for name in seen.inputs]
    check_scale(values[1])
    if builder.keeps_rounding or not isinstance(values[0], Node):
        return None
    scale, zero = values[1], values[2] if len(values) > 2 else None
    if not isinstance(scale, torch.Tensor) or isinstance(zero, Node):
        return None
    if seen.op_type == "QuantizeLinear":
        made = builder.call(quantize_linear, *values, axis=seen.attributes.get("axis", 1))
        builder.unrounded[made] = (values[0], scale, zero)
        return [made]
    found = builder.unrounded.get(values[0])
    if found is None or not torch.equal(found[1], scale):
        return None
    source, _, _ = found
    first = zero if zero is not None else torch.zeros((), dtype=torch.uint8)
    cuts_below = bool((first == torch.iinfo(first.dtype).min).all())
    return [builder.call(torch.nn.functional.relu, source) if cuts_below else source]
