"""The whole lowering of one model, and an account of it.

``lower`` takes what stock or PT2E conversion made; ``lower_rows`` an exported transformer with its
int8 linears as ops, to a graph of ops on row codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.from_fx import from_fx
from x86quant.lowering.graph_tools import (
    FLOAT_OPS,
    attribute,
    drop_unused_buffers,
    is_op,
    label,
    own_call,
)
from x86quant.lowering.passes import PASSES, Pass, Report, run_passes
from x86quant.lowering.passes.floats import FLOAT_RESULTS
from x86quant.lowering.passes.moves import is_shape_node
from x86quant.lowering.row_passes import ROW_PASSES
from x86quant.lowering.row_passes.padding import PADDING_UNREAD
from x86quant.lowering.views import is_view, lies_as_in_float

_NO_OP = "x86quant has no int8 op for it"


@dataclasses.dataclass(frozen=True, slots=True)
class FloatNode:
    """A node that runs as the torch float op, and why."""

    name: str
    op: str
    layer: str
    reason: str

    @classmethod
    def of(cls, gm: GraphModule, node: Node) -> FloatNode:
        """What is known of ``node``, a node of ``gm``."""
        return cls(node.name, _target(gm, node), label(node), node.meta.get("why", _NO_OP))

    def __str__(self) -> str:
        return f"{self.layer}: {self.op} runs in float: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Lowering:
    """A lowered model.

    Attributes:
        canonical: the model as float ops between quantize and dequantize: the reference.
        graph_module: the same as ``x86quant`` ops.
        reports: what each pass did, in order.
    """

    canonical: GraphModule
    graph_module: GraphModule
    reports: tuple[Report, ...]

    @property
    def float_nodes(self) -> tuple[FloatNode, ...]:
        """The nodes that no pass could turn into an int8 op."""
        return tuple(
            FloatNode.of(self.graph_module, node)
            for node in self.graph_module.graph.nodes
            if computes_in_float(node)
        )

    def __str__(self) -> str:
        return "\n".join([*map(str, self.reports), *map(str, self.float_nodes)])


def lower(
    model: nn.Module | ExportedProgram,
    example_inputs: Sequence[Any],
    passes: tuple[Pass, ...] = PASSES,
    *,
    writes: bool = True,
) -> Lowering:
    """Lower ``model``, a result of stock ``convert_fx`` or of PT2E, with ``passes``.

    ``writes`` is as for ``from_fx``.
    """
    canonical = from_fx(model, example_inputs, writes=writes)
    lowered = _copied(canonical)
    if isinstance(model, GraphModule):
        lowered.meta[FLOAT_RESULTS] = model.meta.get(FLOAT_RESULTS)
    reports = run_passes(lowered, passes)
    lowered.delete_all_unused_submodules()
    drop_unused_buffers(lowered)
    return Lowering(canonical, lowered, tuple(reports))


def _copied(canonical: GraphModule) -> GraphModule:
    """A copy whose graph may be rewritten; tensors are shared."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(canonical.graph, val_map={}))
    return GraphModule(canonical, graph, class_name="LoweredGraph").eval()


def computes_in_float(node: Node) -> bool:
    """Whether ``node`` is a convolution that stays in float, or a float op of torch: no view."""
    if is_op(node, *FLOAT_OPS):
        return True
    if node.op in ("placeholder", "get_attr", "output") or is_op(node) or lies_as_in_float(node):
        return False
    if is_view(node):
        return False
    return node.target is not torch.ops.aten.sym_size.int and not is_shape_node(node)


def _target(gm: GraphModule, node: Node) -> str:
    """The name of what ``node`` calls."""
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


def lower_rows(
    exported: GraphModule,
    passes: tuple[Pass, ...] = ROW_PASSES,
    *,
    padding_unread: bool = False,
) -> tuple[GraphModule, tuple[Report, ...]]:
    """``exported``, of aten ops and ours, with what is known of transformers fused.

    It is not changed, and what is returned shares its tensors. Nodes must have ``meta["val"]``.
    With ``padding_unread`` nobody reads rows of a result that a padding mask hides.
    """
    gm = _flat_copy(exported)
    gm.meta[PADDING_UNREAD] = padding_unread
    reports = run_passes(gm, passes)
    drop_unused_buffers(gm)
    return gm, tuple(reports)


def _flat_copy(exported: GraphModule) -> GraphModule:
    """A copy whose constants are buffers of its own, and whose calls of our ops are by name."""
    root = nn.Module()
    graph = Graph()
    values: dict[Node, Node] = {}
    names: dict[str, str] = {}
    for node in exported.graph.nodes:
        if node.op == "get_attr":
            target = str(node.target)
            if target not in names:
                names[target] = target.removeprefix("inner.").replace(".", "_")
                while hasattr(root, names[target]):
                    names[target] += "_"
                root.register_buffer(names[target], attribute(exported, target).detach())
            values[node] = graph.get_attr(names[target])
        elif node.op == "call_function" and (call := own_call(node)) is not None:
            overload, arguments = call
            mapped = {name: _mapped(value, values) for name, value in arguments.items()}
            values[node] = graph.call_function(overload, (), mapped)
        else:
            values[node] = graph.node_copy(node, lambda n: values[n])
        values[node].meta = dict(node.meta)
        if layer := exported_layer(node).removeprefix("inner").removeprefix("."):
            values[node].meta["layer"] = layer
    graph.eliminate_dead_code()  # exports hold weights that nobody reads
    return GraphModule(root, graph, class_name="RowGraph").eval()


def _mapped(value: Any, values: dict[Node, Node]) -> Any:
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, list | tuple):
        return type(value)(_mapped(x, values) for x in value)
    return value
