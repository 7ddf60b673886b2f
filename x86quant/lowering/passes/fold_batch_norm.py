"""Fold a batch norm that follows a convolution or linear, both in float, into weight and bias."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    finish,
    is_op,
    replace,
    sole_user,
    why,
)
from x86quant.lowering.passes._weights import batch_norm_affine, scaled_weight

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of batch norms folded."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is aten.batch_norm.default:
            changed += _fold(gm, node)
    return finish(gm, changed)


def _fold(gm: GraphModule, norm: Node) -> int:
    layer = norm.args[0]
    if not isinstance(layer, Node) or sole_user(layer) is not norm:
        return 0
    if layer.target not in (aten.convolution.default, aten.linear.default):
        return 0
    weight = layer.args[1]
    affine = batch_norm_affine(gm, norm)
    if not is_op(weight, "dequantize_weight") or affine is None:
        return 0
    assert isinstance(weight, Node)
    if weight.kwargs["axis"] != 0:
        why(norm, "follows a transposed convolution")
        return 0
    codes, scales = (constant(gm, weight.kwargs[name]) for name in ("weight", "weight_scales"))
    assert codes is not None
    assert scales is not None
    scaled = scaled_weight(codes, scales, affine[0], 0)
    if scaled is None:
        why(norm, "a negative factor meets a weight of -128")
        return 0
    bias = constant(gm, layer.args[2])
    shift = affine[1] if bias is None else bias * affine[0] + affine[1]
    with gm.graph.inserting_before(layer):
        hint = layer.name
        weight.kwargs = {
            "weight": add_constant(gm, gm.graph, f"{hint}_weight", scaled[0]),
            "weight_scales": add_constant(gm, gm.graph, f"{hint}_weight_scales", scaled[1]),
            "axis": 0,
        }
        _before(weight, [n for n in weight.kwargs.values() if isinstance(n, Node)])
        layer.args = (
            *layer.args[:2],
            add_constant(gm, gm.graph, f"{hint}_bias", shift),
            *layer.args[3:],
        )
    replace(norm, layer)
    return 1


def _before(node: Node, constants: list[Node]) -> None:
    for value in constants:
        node.prepend(value)
