"""Whether a node of a lowered graph runs natively or in torch."""

from __future__ import annotations

from typing import Literal

import torch
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
        "attention",
        "attention_rows",
        "embedding_bags",
        "embedding_rows",
        "gated_rows_rows",
        "interact",
        "linear_dynamic",
        "linear_rows",
        "linear_rows_norm",
        "linear_rows_rows",
        "linear_weight_only",
        "norm_rows",
        "quantize_rows",
    }
)


def runner(node: Node) -> Runner:
    """Whether ``node`` runs natively, in torch, or in either."""
    if is_op(node):
        return "native" if _is_native(node) else "torch"
    if computes_a_size(node):
        return "either"
    return "either" if _codes(node) else "torch"


def _is_native(node: Node) -> bool:
    form = FORMS.get(op_name(node))
    return form is not None and form.takes(node)


def _codes(node: Node) -> bool:
    """Whether ``node`` yields codes: an op's, or a view of such.

    Read from the graph itself, because a graph that was pickled comes back without ``meta``.
    """
    if is_op(node):
        form = FORMS.get(op_name(node))
        return form.gives is torch.uint8 if form else op_name(node) not in _YIELD_FLOATS
    source = node.args[0] if node.args and is_view(node) else None
    return isinstance(source, Node) and _codes(source)
