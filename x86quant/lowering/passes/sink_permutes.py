"""Networks that permute to channels last around norms and linears lose the permutes.

``linear(permute(x))``, where the permute moves channels last, is ``permute(conv1x1(x))``; norms,
tables and affine maps merely change their axis. A permute so moves down until it meets its
inverse and both go. Codes lie channels last in memory anyway: nothing is copied either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    emit,
    finish,
    inherit,
    is_op,
    op_name,
    replace,
)

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of permutes moved or removed."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node._erased:
            continue
        if (permute := _permute_below(node)) is not None:
            changed += _sink(gm, permute, node)
        elif (first := _inverse_below(node)) is not None:
            replace(node, _node(first.args[0]))
            changed += 1
    return finish(gm, changed)


def permutation(node: object) -> tuple[int, ...] | None:
    """The order of dimensions that ``node`` asks for, when it is a permute."""
    if not isinstance(node, Node) or "shape" not in node.meta:
        return None
    if node.target not in (torch.permute, aten.permute.default, "permute"):
        return None
    rest: tuple[Any, ...] = node.args[1:] or tuple(node.kwargs.values())
    dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    rank = len(node.meta["shape"])
    return tuple(dim % rank for dim in dims)


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _moves_channels_last(node: object) -> bool:
    order = permutation(node)
    return order is not None and len(order) in (4, 5) and order == (0, *range(2, len(order)), 1)


def _permute_below(node: Node) -> Node | None:
    """The permute that feeds ``node``, when ``node`` can act before it."""
    if not is_op(node, "layer_norm", "linear", "lut", "affine", "requantize"):
        return None
    permute = _node(node.kwargs["x"])
    if not _moves_channels_last(permute):
        return None
    last = len(permute.meta["shape"]) - 1
    if is_op(node, "layer_norm") and node.kwargs["axis"] != last:
        return None
    if is_op(node, "linear") and node.kwargs["residual"] is not None:
        return None
    return permute


def _inverse_below(node: Node) -> Node | None:
    """The permute that ``node``, a permute, undoes."""
    order = permutation(node)
    first = node.args[0] if order is not None else None
    before = permutation(first)
    if order is None or before is None or len(before) != len(order):
        return None
    restored = tuple(before[dim] for dim in order)
    return _node(first) if restored == tuple(range(len(order))) else None


def _sink(gm: GraphModule, permute: Node, node: Node) -> int:
    order = permutation(permute)
    assert order is not None
    settings = {**node.kwargs, "x": permute.args[0]}
    name = op_name(node)
    with gm.graph.inserting_before(node):
        if name == "linear":
            name, settings = "conv", _as_convolution(gm, settings, len(order) - 2)
        elif "axis" in settings:
            settings["axis"] = order[settings["axis"]]  # type: ignore[index]
        moved = emit(gm.graph, name, node, **settings)
        moved.meta["qparams"] = node.meta["qparams"]
        shape = node.meta["shape"]
        moved.meta["shape"] = (shape[0], shape[-1], *shape[1:-1])
        moved.meta["order"] = order
        new = inherit(gm.graph.call_function(torch.permute, (moved, order)), node)
    replace(node, new)
    return 1


def _as_convolution(gm: GraphModule, settings: dict[str, Any], spatial: int) -> dict[str, Any]:
    weight = constant(gm, settings["weight"])
    assert weight is not None
    kernel = weight.reshape(*weight.shape, *[1] * spatial)
    return {
        **settings,
        "weight": add_constant(gm, gm.graph, f"{settings['weight'].target}_kernel", kernel),
        "stride": [1] * spatial,
        "padding": [0] * spatial,
        "dilation": [1] * spatial,
        "groups": 1,
        "transposed": False,
        "output_padding": [0] * spatial,
    }
