"""Who runs a node of a lowered graph."""

from __future__ import annotations

from typing import Literal

from torch.fx import Node

from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.views import computes_a_size, is_view

#: "native": in a segment. "torch": outside of one. "either": wherever its inputs are, for it
#: computes sizes or looks at the same codes in another shape.
Runner = Literal["native", "torch", "either"]

_NATIVE = frozenset(
    {
        "adaptive_avg_pool",
        "add",
        "affine",
        "avg_pool",
        "cat",
        "conv",
        "dequantize",
        "layer_norm",
        "linear",
        "lut",
        "max_pool",
        "mul",
        "quantize",
        "requantize",
    }
)
#: Ops of ours whose results are no codes with one scale.
_YIELD_FLOATS = frozenset(
    {
        "attention",
        "attention_rows",
        "dequantize",
        "gated_rows_rows",
        "linear_dynamic",
        "linear_rows",
        "linear_rows_norm",
        "linear_rows_rows",
        "linear_weight_only",
        "norm_rows",
        "quantize_rows",
    }
)
_UPSAMPLE_MODES = ("nearest", "bilinear")


def runner(node: Node) -> Runner:
    """Who runs ``node``."""
    if is_op(node):
        return "native" if _is_native(node) else "torch"
    if computes_a_size(node):
        return "either"
    return "either" if _codes(node) else "torch"


def _is_native(node: Node) -> bool:
    name = op_name(node)
    return name in _NATIVE or (name == "upsample" and node.kwargs["mode"] in _UPSAMPLE_MODES)


def _codes(node: Node) -> bool:
    """Whether ``node`` yields codes: an op's, or a view of such.

    Read from the graph itself, because a graph that was pickled comes back without ``meta``.
    """
    if is_op(node):
        return op_name(node) not in _YIELD_FLOATS
    source = node.args[0] if node.args and is_view(node) else None
    return isinstance(source, Node) and _codes(source)
