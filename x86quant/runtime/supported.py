"""Whether a node of a lowered graph runs natively or in torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from torch.fx import Node

from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.result_layout import lies_as_in_float
from x86quant.lowering.views import computes_a_size, is_reshape, is_roll, is_view
from x86quant.runtime.native_forms import FORMS

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
