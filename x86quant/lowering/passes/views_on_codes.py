"""Move data, not reals: reshape, slice, permute, shuffle and pad act on codes.

``view(dequantize(x))`` becomes ``dequantize(view(x))``; the dequantize then meets a quantize of
the same qparams further down and both go. Questions about the shape are asked of the codes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    dequantized,
    emit,
    finish,
    inherit,
    qparams_of,
    scale_and_zp,
    why,
)

aten = torch.ops.aten

# fmt: off
_METHODS = frozenset({
    "chunk", "expand", "flatten", "flip", "movedim", "narrow", "permute", "repeat", "reshape",
    "roll", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unbind",
    "unflatten", "unsqueeze",
})
# fmt: on

_FUNCTIONS = frozenset(
    {
        operator.getitem,
        F.pixel_shuffle,
        F.pixel_unshuffle,
        *(getattr(torch, name) for name in _METHODS if hasattr(torch, name)),
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
    }
)

_QUESTIONS = frozenset({"size", "dim", "ndimension", "numel", "stride"})


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of nodes that now act on codes."""
    changed = 0
    for node in list(gm.graph.nodes):
        codes = dequantized(node.args[0]) if node.args else None
        if codes is None:
            continue
        if _is_question(node):
            node.args = (codes, *node.args[1:])
            changed += 1
        elif _is_view(node):
            changed += _move(gm, node, codes)
        elif node.target is F.pad and _pads_with_zero(node):
            changed += _move_pad(gm, node, codes)
    return finish(gm, changed)


def is_shape_node(node: Node) -> bool:
    """Whether ``node`` moves codes, or computes with sizes: no arithmetic on reals."""
    if _is_question(node) or "qparams" in node.meta or node.target is operator.getitem:
        return True
    if "shape" in node.meta:
        return False
    # Not a tensor: a tuple of views, or arithmetic on sizes.
    return _is_view(node) or getattr(node.target, "__module__", "") == "_operator"


def _is_question(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _QUESTIONS
    return node.target is getattr and node.args[1] in ("shape", "ndim")


def _is_view(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    return node.op == "call_function" and node.target in _FUNCTIONS


def _move(gm: GraphModule, node: Node, codes: Node) -> int:
    pieces = [user for user in node.users if _is_item(user, node)]
    if pieces and len(pieces) < len(node.users):
        why(node, "the tuple it returns is used whole")
        return 0
    # A tuple (chunk, split, ...) has no qparams of its own: its items are dequantized.
    outputs = pieces if _is_tuple(node) else [node]
    node.args = (codes, *node.args[1:])
    for output in outputs:
        _dequantize_after(gm, output, codes)
    return 1


def _is_tuple(node: Node) -> bool:
    return "shape" not in node.meta


def _is_item(user: Node, node: Node) -> bool:
    return user.target is operator.getitem and user.args[0] is node and _is_tuple(node)


def _dequantize_after(gm: GraphModule, node: Node, codes: Node) -> None:
    node.meta["qparams"] = qparams_of(codes)
    with gm.graph.inserting_after(node):
        real = emit(gm.graph, "dequantize", x=node, **scale_and_zp("x", codes))
    inherit(real, node)
    node.replace_all_uses_with(real, delete_user_cb=lambda user: user is not real)


def _pads_with_zero(node: Node) -> bool:
    arguments: dict[str, Any] = dict(
        zip(("input", "pad", "mode", "value"), node.args, strict=False)
    )
    arguments.update(node.kwargs)
    constant = arguments.get("mode", "constant") == "constant"
    return constant and arguments.get("value") in (None, 0, 0.0)


def _move_pad(gm: GraphModule, node: Node, codes: Node) -> int:
    pad = node.args[1] if len(node.args) > 1 else node.kwargs["pad"]
    node.args = (codes, pad, "constant", qparams_of(codes).zero_point)
    node.kwargs = {}
    _dequantize_after(gm, node, codes)
    return 1
