"""A graph for calls that leave arguments out, by that for calls that give them.

Transformers takes a mask that is not given for one that hides nothing, and kinds of tokens for
zeros. Tracing such a call anew takes seconds; putting these values into the graph that is there
takes none. Whether they are what the model computes with is for the proof to tell.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph, GraphModule, Node

from x86quant.capture.traced_graph import Traced
from x86quant.forms.call_form import CallForm
from x86quant.forms.guard import Guard
from x86quant.forms.size_conditions import renumbered

#: What a model of transformers computes with where such an argument is not given.
_VALUES = {"attention_mask": 1, "token_type_ids": 0}
#: The argument whose sizes they have.
_IDS = "input_ids"


def filled(traced: Traced, fewer: CallForm) -> Traced | None:
    """``traced`` as a graph of calls of ``fewer``.

    None unless that leaves out nothing but arguments whose values are known.
    """
    form = traced.form
    left_out = _left_out(form, fewer)
    if not left_out or _IDS not in fewer.names:
        return None
    inputs = dict(zip(form.names, traced.guard.inputs, strict=True))
    ids = inputs[_IDS]
    if any((inputs[name].dtype, inputs[name].rank) != (ids.dtype, ids.rank) for name in left_out):
        return None
    gm = _with_values(traced.graph_module, left_out)
    guard = _without(traced.guard, form, left_out)
    return dataclasses.replace(traced, graph_module=gm, form=fewer, guard=guard)


def _left_out(form: CallForm, fewer: CallForm) -> frozenset[str]:
    """The tensors that calls of ``fewer`` lack, if that is the only difference."""
    if form.arguments.keys != fewer.arguments.keys:
        return frozenset()
    found: set[str] = set()
    for name, part, other in zip(
        form.arguments.keys, form.arguments.parts, fewer.arguments.parts, strict=True
    ):
        if part.kind is None and other.kind is type(None) and name in _VALUES:
            found.add(name)
        elif part != other:
            return frozenset()
    return frozenset(found)


def _with_values(gm: GraphModule, left_out: frozenset[str]) -> GraphModule:
    """``gm`` with known values in place of the inputs named; it shares its tensors."""
    graph = Graph()
    values: dict[Node, Node] = {}
    inputs = {str(n.target): n for n in gm.graph.nodes if n.op == "placeholder"}
    for name, source in inputs.items():
        if name not in left_out:
            values[source] = graph.node_copy(source)
    ids = values[inputs[_IDS]]
    sizes = [_size(graph, ids, dim) for dim in range(ids.meta["val"].dim())]
    absent = [inputs[name] for name in inputs if name in left_out]
    for source in absent:
        values[source] = _full(graph, sizes, source)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.sym_size.int and node.args[0] in absent:
            values[node] = sizes[node.args[1]]
        elif node.op != "placeholder":
            values[node] = graph.node_copy(node, lambda n: values[n])
    return GraphModule(gm, graph)


def _size(graph: Graph, x: Node, dim: int) -> Node:
    node = graph.call_function(torch.ops.aten.sym_size.int, (x, dim))
    node.meta["val"] = x.meta["val"].shape[dim]
    return node


def _full(graph: Graph, sizes: list[Node], source: Node) -> Node:
    """What stands for the input ``source``."""
    value = source.meta["val"]
    node = graph.call_function(
        torch.ops.aten.full.default, (sizes, _VALUES[str(source.target)]), {"dtype": value.dtype}
    )
    node.meta["val"] = value
    return node


def _without(guard: Guard, form: CallForm, left_out: frozenset[str]) -> Guard:
    """``guard`` without the inputs named, whose sizes are those of the ids."""
    numbers: dict[str, int] = {}
    for name in form.names:
        if name not in left_out:
            numbers[name] = len(numbers)
    places = [numbers.get(name, numbers[_IDS]) for name in form.names]
    conditions = tuple(renumbered(condition, places) for condition in guard.conditions)
    inputs = tuple(
        spec for name, spec in zip(form.names, guard.inputs, strict=True) if name not in left_out
    )
    return dataclasses.replace(guard, inputs=inputs, conditions=conditions)
