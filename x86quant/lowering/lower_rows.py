"""From an exported transformer, with its int8 linears as ops, to a graph of ops on row codes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.graph_tools import attribute, drop_unused_buffers, own_call
from x86quant.lowering.passes import Report, run_passes
from x86quant.lowering.row_passes import ROW_PASSES
from x86quant.lowering.row_passes.leave_out_padding import PADDING_UNREAD


def lower_rows(
    exported: GraphModule, *, padding_unread: bool = False
) -> tuple[GraphModule, tuple[Report, ...]]:
    """``exported``, of aten ops and ours, with what is known of transformers fused.

    It is not changed, and what is returned shares its tensors. Nodes must have ``meta["val"]``.
    With ``padding_unread`` nobody reads rows of a result that a padding mask hides.
    """
    gm = _flat_copy(exported)
    gm.meta[PADDING_UNREAD] = padding_unread
    reports = run_passes(gm, ROW_PASSES)
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
    return GraphModule(root, graph, class_name="RowGraph").eval()


def _mapped(value: Any, values: dict[Node, Node]) -> Any:
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, list | tuple):
        return type(value)(_mapped(x, values) for x in value)
    return value
