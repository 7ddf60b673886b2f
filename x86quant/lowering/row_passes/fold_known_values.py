"""Values that depend on weights and fixed sizes alone are computed once, not on each run.

Masks of shifted windows and tables of position biases are such. What is large stays as it was,
since it would be stored with the model.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import add_constant, constant, finish, inherit, is_op
from x86quant.lowering.row_passes._values import value_of

aten = torch.ops.aten

_MOST_ELEMENTS = 1 << 20
# Of their tensor argument they read the type only.
_LIKE = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of values computed."""
    known: dict[Node, torch.Tensor] = {}
    for node in gm.graph.nodes:
        value = _value(gm, node, known)
        if value is not None:
            known[node] = value
    changed = 0
    first = next(iter(gm.graph.nodes))  # where no pass can put what reads a constant before it
    for node, value in known.items():
        if all(user in known for user in node.users):
            continue  # read by no other
        with gm.graph.inserting_before(first):
            new = inherit(add_constant(gm, gm.graph, node.name, value.contiguous().clone()), node)
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in known)
        changed += 1
    return finish(gm, changed)


def _value(gm: GraphModule, node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    if not isinstance(node.target, torch._ops.OpOverload) or is_op(node):
        return None
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    fake = value_of(node)
    if fake is None or not all(type(size) is int for size in fake.shape):
        return None
    if fake.numel() > _MOST_ELEMENTS or fake.dtype == torch.int8:
        return None
    inputs = {one: _input(gm, one, known) for one in node.all_input_nodes}
    if node.target in _LIKE and isinstance(node.args[0], Node):
        like = value_of(node.args[0])
        inputs[node.args[0]] = None if like is None else torch.empty(0, dtype=like.dtype)
    if not inputs or any(value is None for value in inputs.values()):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: inputs[one])
    with torch.no_grad():
        value = node.target(*args, **kwargs)
    same = isinstance(value, torch.Tensor) and value.shape == fake.shape
    return value if same and value.dtype == fake.dtype else None


def _input(gm: GraphModule, node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    found = known.get(node)
    return constant(gm, node) if found is None else found
