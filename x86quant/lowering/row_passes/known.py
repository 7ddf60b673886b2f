"""What is known before any call, and what changes nothing."""

from __future__ import annotations

import sys

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import add_constant, constant, finish, inherit, is_op
from x86quant.lowering.row_passes._values import argument, same_sizes, value_of

aten = torch.ops.aten

_STRIDED = frozenset({aten.as_strided.default, aten.as_strided_copy.default})


def drop_identities(gm: GraphModule) -> int:
    """Copies, whole slices, views and padding that change nothing go.

    Returns the number of nodes dropped.
    """
    if any(node.target in _STRIDED for node in gm.graph.nodes):
        return 0  # they see how memory lies, which copies decide
    changed = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)
            changed += 1
            continue
        source = _same_as(node)
        if source is None or _is_returned(node):
            continue
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _same_as(node: Node) -> Node | None:
    """The value that ``node`` merely repeats."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is aten.clone.default:
        return source
    if node.target is aten.slice.Tensor:
        start, end, step = (
            argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
        )  # fmt: skip
        whole = start in (0, None) and step == 1 and (end is None or end == sys.maxsize)
        return source if whole else None
    if node.target is aten.pad.default:
        return source if all(type(n) is int and n == 0 for n in node.args[1]) else None  # type: ignore[union-attr]
    if node.target is aten.reshape.default:
        return source if same_sizes(node, source) else None
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        rank = 0 if (value := value_of(node)) is None else value.dim()
        dims = [{int(d) % rank for d in n.args[1:3]} for n in (node, source)] if rank else [0, 1]  # type: ignore[arg-type]
        inner = source.args[0]
        return inner if dims[0] == dims[1] and isinstance(inner, Node) else None
    return None


def _is_returned(node: Node) -> bool:
    """Whether the graph returns ``node``, which must not be another's memory."""
    return any(user.op == "output" for user in node.users)


_MOST_ELEMENTS = 1 << 20
# Of their tensor argument they read the type only.
_LIKE = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)


def fold_known_values(gm: GraphModule) -> int:
    """Values that depend on weights and fixed sizes alone are computed once, not on each run.

    Masks of shifted windows and tables of position biases are such. What is large stays as it was,
    since it would be stored with the model.

    Returns the number of values computed.
    """
    known: dict[Node, torch.Tensor] = {}
    for node in gm.graph.nodes:
        value = _known_value(gm, node, known)
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


def _known_value(
    gm: GraphModule, node: Node, known: dict[Node, torch.Tensor]
) -> torch.Tensor | None:
    if not isinstance(node.target, torch._ops.OpOverload) or is_op(node):
        return None
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    fake = value_of(node)
    if fake is None or not all(type(size) is int for size in fake.shape):
        return None
    if fake.numel() > _MOST_ELEMENTS or fake.dtype == torch.int8:
        return None
    inputs = {one: _known_input(gm, one, known) for one in node.all_input_nodes}
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


def _known_input(
    gm: GraphModule, node: Node, known: dict[Node, torch.Tensor]
) -> torch.Tensor | None:
    found = known.get(node)
    return constant(gm, node) if found is None else found
