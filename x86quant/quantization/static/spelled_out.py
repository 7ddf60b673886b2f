"""Functions of one tensor that are spelled out in several steps, such as ``x * relu6(x + 3) / 6``.

Each is one step in int8: a table. The steps inside of it are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.normalize import JOINS, UNARY, normalized_node
from x86quant.quantization.static.int8_forms import ORIGINS, kind_of


def spelled_out(gm: GraphModule, modules: Mapping[str, nn.Module]) -> dict[Node, frozenset[Node]]:
    """The last step of each such function, with all steps of it."""
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    found: dict[Node, frozenset[Node]] = {}
    taken: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if node in taken or kind_of(node, module) not in ORIGINS:
            continue
        steps = _steps_before(node, modules, order)
        if steps is not None:
            found[node] = steps
            taken |= steps
    return found


def _steps_before(
    last: Node, modules: Mapping[str, nn.Module], order: Mapping[Node, int]
) -> frozenset[Node] | None:
    """The most steps that compute ``last`` of one tensor; None if nothing is joined in them."""
    if not _is_step(last, modules):
        return None
    steps, best = {last}, None
    while True:
        sources = {x for step in steps for x in step.all_input_nodes} - steps
        if not sources or any(x.op == "get_attr" for x in sources):
            return best
        joins = len(steps) > 1 and any(len(step.all_input_nodes) > 1 for step in steps)
        if len(sources) == 1 and joins:
            best = frozenset(steps)
        latest = max(sources, key=order.__getitem__)
        if not _is_step(latest, modules) or not steps.issuperset(latest.users):
            return best
        steps.add(latest)


def _is_step(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    call = normalized_node(node, module)
    return call is not None and (call[0] in UNARY or call[0] in JOINS)
