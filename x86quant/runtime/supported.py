"""Whether a node of a lowered graph runs natively or in torch."""

from __future__ import annotations

from typing import Literal

from torch.fx import Node

from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.views import computes_a_size, is_view
from x86quant.runtime.native_forms import FORMS

#: "native": in a segment. "torch": outside of one. "either": wherever its inputs are, for it
#: computes sizes or looks at the same codes in another shape.
Runner = Literal["native", "torch", "either"]

#: Ops of ours without a native form whose results are no codes with one scale.
_YIELD_FLOATS = frozenset(
    {
        "embedding_bags",
        "embedding_rows",
        "interact",
        "linear_dynamic",
        "linear_weight_only",
    }
)


def runner(node: Node) -> Runner:
    """Whether ``node`` runs natively, in torch, or in either."""
    if is_op(node):
        return "native" if _is_native(node) else "torch"
    if computes_a_size(node):
        return "either"
    return "either" if _is_viewed(node) else "torch"


def _is_native(node: Node) -> bool:
    form = FORMS.get(op_name(node))
    return form is not None and form.takes(node)


def _is_viewed(node: Node) -> bool:
    """Whether ``node`` yields what an op of ours computed, or a view of it, in native memory.

    Read from the graph itself, because a graph that was pickled comes back without ``meta``.
    """
    if is_op(node):
        form = FORMS.get(op_name(node))
        return form.viewed if form else op_name(node) not in _YIELD_FLOATS
    source = node.args[0] if node.args and is_view(node) else None
    return isinstance(source, Node) and _is_viewed(source)
