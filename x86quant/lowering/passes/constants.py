"""What is known before any call is computed once, and goes into weights."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    finish,
    inherit,
    is_op,
    replace,
    sole_user,
    why,
)
from x86quant.lowering.passes.products import batch_norm_affine, scaled_weight

aten = torch.ops.aten


def fold_constants(gm: GraphModule) -> int:
    """Compute once what depends on constants only. Int8 weights stay as they are.

    Returns the number of nodes folded.
    """
    return fold(gm, weights=False)


def fold(gm: GraphModule, *, weights: bool) -> int:
    """Fold constants, dequantized weights too if ``weights``."""
    changed = 0
    for node in list(gm.graph.nodes):
        if not _foldable(gm, node) or (is_op(node, "dequantize_weight") and not weights):
            continue
        args = map_arg(node.args, lambda n: constant(gm, n))
        kwargs = map_arg(node.kwargs, lambda n: constant(gm, n))
        for result, value in _results(node, node.target(*args, **kwargs)):
            with gm.graph.inserting_before(result):
                new = inherit(add_constant(gm, gm.graph, result.name, value), result)
            if "why" in result.meta:
                new.meta["why"] = result.meta["why"]
            replace(result, new)
            changed += 1
    return finish(gm, changed)


def _results(node: Node, value: object) -> list[tuple[Node, torch.Tensor]]:
    """What ``node`` gives where that is ``value``: it, or each of a list that is taken of it."""
    if isinstance(value, torch.Tensor):
        return [(node, value)]
    if not isinstance(value, list | tuple) or any(
        u.target is not operator.getitem for u in node.users
    ):
        return []
    return [(user, value[int(user.args[1])]) for user in node.users]  # type: ignore[arg-type]


def _foldable(gm: GraphModule, node: Node) -> bool:
    """An aten op or one of ours that reads constant tensors only."""
    inputs = node.all_input_nodes
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and bool(inputs)
        and all(constant(gm, value) is not None for value in inputs)
        and len(node.target._schema.returns) == 1
    )


def fold_batch_norm(gm: GraphModule) -> int:
    """Fold a batch norm that follows a convolution or linear, both in float, into weight and bias.

    Returns the number of batch norms folded.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is aten.batch_norm.default:
            changed += _fold_norm(gm, node)
    return finish(gm, changed)


def _fold_norm(gm: GraphModule, norm: Node) -> int:
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
    scaled = scaled_weight(codes, scales, affine[0])
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


def fold_float_weights(gm: GraphModule) -> int:
    """Weights of layers that stay in float are dequantized once, not on each run.

    Returns the number of weights folded.
    """
    return fold(gm, weights=True)
