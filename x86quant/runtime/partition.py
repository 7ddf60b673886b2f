"""Cuts a lowered graph into segments that run natively and nodes that torch runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.graph_tools import attribute, is_op, op_name
from x86quant.lowering.views import (
    ON_SIZES,
    computes_a_size,
    is_reshape,
    is_roll,
    is_view,
    lies_as_in_float,
)
from x86quant.runtime.known_values import KnownValues, known_nodes, sizes_of
from x86quant.runtime.native_forms import FORMS
from x86quant.runtime.segment import Segment


def partition(
    lowered: GraphModule,
    make: Callable[[GraphModule, str], Segment],
    torch_nodes: Collection[str] = (),
) -> GraphModule:
    """A module that does what ``lowered`` does, with its native nodes gathered into segments.

    ``make`` builds a segment from a graph module and its name; torch runs ``torch_nodes``. Each
    node gets a stage: even ones are native, odd ones are not, and stages never decrease along an
    edge. So everything native of one stage can run together without waiting for anything that
    comes later. Sizes of inputs come first; what depends on them alone is kept from call to call.
    """
    known = known_nodes(lowered.graph, torch_nodes)
    stages = _stages(lowered.graph, torch_nodes, known)
    root = nn.Module()
    graph = Graph()
    values: dict[Node, Node] = {}
    by_stage: dict[int, list[Node]] = {}
    output: Node | None = None
    for node in lowered.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.node_copy(node)
        elif node.op == "output":
            output = node
        elif node.op != "get_attr":
            by_stage.setdefault(stages[node], []).append(node)
    assert output is not None

    def value_of(node: Node) -> Node:
        if node not in values:  # a constant
            name = str(node.target).replace(".", "_")
            if not hasattr(root, name):
                root.register_buffer(name, attribute(lowered, str(node.target)))
            values[node] = graph.get_attr(name)
        return values[node]

    if known:
        for size in sizes_of(known):
            values[size] = graph.node_copy(size, value_of)
        _add_part(
            lowered, known, lambda gm, _: KnownValues(gm), "known_values", root, graph, values
        )
    done = {*values, *known}
    for stage in sorted(by_stage):
        nodes = [node for node in by_stage[stage] if node not in done]
        if stage % 2:
            for node in nodes:
                values[node] = graph.node_copy(node, value_of)
                if node.op == "call_module":
                    _keep_module(root, lowered, str(node.target))
        elif nodes:
            name = f"segment_{sum(key.startswith('segment_') for key, _ in root.named_children())}"
            given = {n: value_of(n) for n in _read(nodes) if n.op == "get_attr"}
            _add_part(lowered, nodes, make, name, root, graph, values, given)
    graph.output(torch.fx.node.map_arg(output.args[0], value_of))
    return GraphModule(root, graph, class_name="Partitioned").eval()


#: The stage, which torch runs, of numbers that need nothing but the sizes of inputs.
_OF_SIZES = -1


def _is_size_of_inputs(node: Node, stages: Mapping[Node, int]) -> bool:
    if node.target is torch.ops.aten.sym_size.int:
        return all(before.op == "placeholder" for before in node.all_input_nodes)
    sources = node.all_input_nodes
    return node.target in ON_SIZES and all(stages.get(n) == _OF_SIZES for n in sources)


def _stages(graph: Graph, torch_nodes: Collection[str], known: Collection[Node]) -> dict[Node, int]:
    """The stage of every node that computes something."""
    stages: dict[Node, int] = dict.fromkeys(known, 0)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in stages:
            continue
        if _is_size_of_inputs(node, stages):
            stages[node] = _OF_SIZES
            continue
        stage = max((stages.get(before, 0) for before in node.all_input_nodes), default=0)
        by = runner(node, torch_nodes)
        wanted = {"native": 0, "torch": 1, "either": stage % 2}[by]
        stages[node] = stage if stage % 2 == wanted else stage + 1
    return stages


def _add_part(
    lowered: GraphModule,
    nodes: list[Node],
    make: Callable[[GraphModule, str], nn.Module],
    name: str,
    root: nn.Module,
    graph: Graph,
    values: dict[Node, Node],
    given: Collection[Node] = (),
) -> None:
    """Move ``nodes`` into a module of their own and call it in ``graph``.

    It has constants of its own, but for those that are ``given`` to it as inputs are.
    """
    inside = set(nodes)
    inputs = [
        n
        for n in dict.fromkeys(before for node in nodes for before in node.all_input_nodes)
        if n not in inside and (n.op != "get_attr" or n in given)
    ]
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    # In the order in which the graph takes and returns them: one segment may be all of a program.
    taken = {node: i for i, node in enumerate(lowered.graph.nodes)}
    inputs.sort(key=taken.__getitem__)
    returned = {node: i for i, node in enumerate(list(lowered.graph.nodes)[-1].all_input_nodes)}
    outputs.sort(key=lambda node: returned.get(node, len(returned)))
    root.add_module(name, make(_extract(lowered, nodes, inputs, outputs), name))
    call = graph.call_module(name, tuple(values[n] for n in inputs))
    for index, node in enumerate(outputs):
        values[node] = graph.call_function(operator.getitem, (call, index))


#: Arguments that steps read where they lie, rather than pack, even if they are constants: what is
#: computed from, and tensors that say how.
_READ = ("x", "xs", "a", "b", "q", "k", "v", "residual", "mask", "h", "c", "places")


def _read(nodes: Iterable[Node]) -> Iterator[Node]:
    """What ``nodes`` read so."""
    for node in nodes:
        for name in _READ:
            value = node.kwargs.get(name)
            several = value if isinstance(value, list | tuple) else (value,)
            yield from (one for one in several if isinstance(one, Node))


def _extract(
    lowered: GraphModule, nodes: list[Node], inputs: list[Node], outputs: list[Node]
) -> GraphModule:
    """``nodes`` as a graph module of their own; it shares the buffers of ``lowered``."""
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in inputs:
        values[node] = graph.placeholder(node.name)
        values[node].meta = dict(node.meta)

    def value_of(node: Node) -> Node:
        if node not in values and node.op == "get_attr":
            values[node] = graph.node_copy(node)
        return values[node]

    for node in nodes:
        values[node] = graph.node_copy(node, value_of)
        values[node].meta = dict(node.meta)
    graph.output(tuple(values[node] for node in outputs))
    return GraphModule(lowered, graph, class_name="SegmentGraph").eval()


def _keep_module(root: nn.Module, lowered: GraphModule, target: str) -> None:
    """Give ``root`` the submodule that ``lowered`` has under ``target``."""
    at = root
    *parents, name = target.split(".")
    for parent in parents:
        if not hasattr(at, parent):
            at.add_module(parent, nn.Module())
        at = at.get_submodule(parent)
    at.add_module(name, lowered.get_submodule(target))


#: "native": in a segment. "torch": outside of one. "either": wherever its inputs are, for it
#: computes sizes or looks at the same codes in another shape.
Runner = Literal["native", "torch", "either"]

_LOOKUPS = ("embedding_bags", "interact_bags")

#: Ops of ours without a native form whose results are no codes with one scale.
_YIELD_FLOATS = frozenset(
    {
        "embedding_rows",
        "interact",
        "linear_dynamic",
        "linear_weight_only",
    }
)


def runner(node: Node, torch_nodes: Collection[str] = ()) -> Runner:
    """Whether ``node`` runs natively, in torch, or in either; torch runs ``torch_nodes``."""
    if node.name in torch_nodes:
        return "torch"
    if is_op(node):
        return "native" if _is_native(node) else "torch"
    if computes_a_size(node):
        return "either"
    return "either" if _is_viewed(node) or _is_operand(node, torch_nodes) else "torch"


def _is_operand(node: Node, torch_nodes: Collection[str]) -> bool:
    """Whether ``node`` is a part of an input that native lookups alone read."""
    return _is_of_input(node) and _read_by_lookups(node, torch_nodes)


def _is_of_input(node: Node) -> bool:
    source = node.args[0] if node.args and is_view(node) and not is_reshape(node) else None
    return isinstance(source, Node) and (source.op == "placeholder" or _is_of_input(source))


def _read_by_lookups(node: Node, torch_nodes: Collection[str]) -> bool:
    return all(
        _read_by_lookups(user, torch_nodes)
        if _is_of_input(user)
        else is_op(user, *_LOOKUPS) and _is_native(user) and user.name not in torch_nodes
        for user in node.users
    )


def _is_native(node: Node) -> bool:
    form = FORMS.get(op_name(node))
    return form is not None and form.takes(node)


def _is_viewed(node: Node) -> bool:
    """Whether ``node`` yields what an op of ours computed, or moves it, in native memory.

    Read from the graph itself, because a graph that was pickled comes back without ``meta``.
    """
    if is_op(node):
        form = FORMS.get(op_name(node))
        return form.viewed if form else op_name(node) not in _YIELD_FLOATS
    moves = is_view(node) or is_roll(node) or lies_as_in_float(node)
    source = node.args[0] if node.args and moves else None
    return isinstance(source, Node) and _is_viewed(source)
