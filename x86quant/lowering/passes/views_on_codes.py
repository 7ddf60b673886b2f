"""Move data, not reals: reshape, slice, permute, shuffle and pad act on codes.

``view(dequantize(x))`` becomes ``dequantize(view(x))``; the dequantize then meets a quantize of
the same qparams further down and both go. Questions about the shape are asked of the codes.
"""

from __future__ import annotations

import operator
from typing import Any

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
from x86quant.lowering.views import is_question, moves_codes
from x86quant.ops.pool import PAD_MODES


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of nodes that now act on codes."""
    changed = 0
    for node in list(gm.graph.nodes):
        codes = dequantized(node.args[0]) if node.args else None
        if codes is None:
            continue
        if is_question(node):
            node.args = (codes, *node.args[1:])
            changed += 1
        elif moves_codes(node):
            changed += _move(gm, node, codes)
        elif node.target is F.pad and len(node.args) == 4 and _pads_with_own_values(node):
            changed += _move_pad(gm, node, codes)
    return finish(gm, changed)


def is_shape_node(node: Node) -> bool:
    """Whether ``node`` moves codes, or computes with sizes: no arithmetic on reals."""
    if is_question(node) or "qparams" in node.meta or node.target is operator.getitem:
        return True
    if "shape" in node.meta:
        return False
    # Not a tensor: a tuple of views, or arithmetic on sizes.
    return moves_codes(node) or getattr(node.target, "__module__", "") == "_operator"


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
    with gm.graph.inserting_after(node):
        real = emit(gm.graph, "dequantize", x=node, **scale_and_zp("x", codes))
    inherit(real, node)  # before the node has qparams: reals have none
    node.meta["qparams"] = qparams_of(codes)
    node.replace_all_uses_with(real, delete_user_cb=lambda user: user is not real)


def _pads_with_own_values(node: Node) -> bool:
    """Whether ``node`` adds zeros, or values that it copies."""
    _, _, mode, value = node.args
    return mode in PAD_MODES and (mode != "constant" or value in (None, 0, 0.0))


def _move_pad(gm: GraphModule, node: Node, codes: Node) -> int:
    given: tuple[Any, ...] = node.args
    _, pad, mode, _ = given
    shape = codes.meta.get("shape")
    before, after = pad[-2::-2], pad[::-2]
    if shape is not None and 3 <= len(shape) == len(before) + 2 and min(*before, *after) >= 0:
        margins = {"before": before, "after": after, "mode": mode}
        with gm.graph.inserting_before(node):
            new = emit(gm.graph, "pad", node, x=codes, x_zp=qparams_of(codes).zero_point, **margins)
        inherit(new, node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    elif mode == "constant":
        node.args = (codes, pad, "constant", qparams_of(codes).zero_point)
        new = node
    else:
        return 0
    _dequantize_after(gm, new, codes)
    return 1
