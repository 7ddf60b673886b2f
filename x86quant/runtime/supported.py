"""Who runs a node of a lowered graph."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch.fx import Node

from x86quant.lowering.graph_tools import is_op, op_name

aten = torch.ops.aten

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
#: Ops of ours whose results are no codes.
_YIELD_FLOATS = frozenset({"dequantize", "linear_dynamic", "linear_weight_only"})
_UPSAMPLE_MODES = ("nearest", "bilinear")

#: Views, and what may copy codes into another shape but never changes or repeats them.
_VIEW_METHODS = frozenset(
    {
        "chunk", "flatten", "movedim", "narrow", "permute", "reshape", "select", "split",
        "squeeze", "swapaxes", "swapdims", "t", "transpose", "unbind", "unflatten", "unsqueeze",
        "view",
    }
)  # fmt: skip
_QUESTIONS = frozenset({"size", "dim", "ndimension", "numel"})
_VIEW_FUNCTIONS = frozenset(
    {
        operator.getitem,
        aten.flatten.using_ints,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.squeeze.dim,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        *(getattr(torch, name) for name in _VIEW_METHODS if hasattr(torch, name)),
    }
)
_ON_SIZES = frozenset(
    {operator.add, operator.floordiv, operator.mod, operator.mul, operator.sub, operator.neg}
)


def runner(node: Node) -> Runner:
    """Who runs ``node``."""
    if is_op(node):
        return "native" if _is_native(node) else "torch"
    if node.op == "call_method":
        name = str(node.target)
        return (
            "either" if name in _QUESTIONS or (name in _VIEW_METHODS and _codes(node)) else "torch"
        )
    if node.op != "call_function":
        return "torch"
    if node.target in _ON_SIZES:
        return "either" if _computes_a_size(node) else "torch"
    if node.target is getattr and node.args[1] == "shape":
        return "either"
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        # Of a shape, of codes, or of a tuple of either.
        return runner(node.args[0]) if not _codes(node) else "either"
    return "either" if node.target in _VIEW_FUNCTIONS and _codes(node) else "torch"


def is_view(node: Node) -> bool:
    """Whether ``node`` only looks at its input in another shape, or at a part of it."""
    if node.op == "call_method":
        return str(node.target) in _VIEW_METHODS
    return node.target in _VIEW_FUNCTIONS


def _is_native(node: Node) -> bool:
    name = op_name(node)
    return name in _NATIVE or (name == "upsample" and node.kwargs["mode"] in _UPSAMPLE_MODES)


def _codes(node: Node) -> bool:
    """Whether ``node`` yields codes: an op's, or a view of such.

    Read from the graph itself, because a graph that was pickled comes back without ``meta``.
    """
    if is_op(node):
        return op_name(node) not in _YIELD_FLOATS
    return is_view(node) and isinstance(node.args[0], Node) and _codes(node.args[0])


def _computes_a_size(node: Node) -> bool:
    """Whether every operand is a number or a node that yields one."""
    return all(
        runner(arg) == "either" and not _codes(arg) if isinstance(arg, Node) else True
        for arg in node.args
    )
