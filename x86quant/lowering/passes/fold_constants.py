"""Compute once what depends on constants only. Int8 weights stay as they are."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import add_constant, constant, finish, inherit, is_op, replace


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of nodes folded."""
    return fold(gm, weights=False)


def fold(gm: GraphModule, *, weights: bool) -> int:
    """Fold constants, dequantized weights too if ``weights``."""
    changed = 0
    for node in list(gm.graph.nodes):
        if not _foldable(gm, node) or (is_op(node, "dequantize_weight") and not weights):
            continue
        args = map_arg(node.args, lambda n: constant(gm, n))
        kwargs = map_arg(node.kwargs, lambda n: constant(gm, n))
        for result, value in _tensors(node, node.target(*args, **kwargs)):
            with gm.graph.inserting_before(result):
                new = inherit(add_constant(gm, gm.graph, result.name, value), result)
            if "why" in result.meta:
                new.meta["why"] = result.meta["why"]
            replace(result, new)
            changed += 1
    return finish(gm, changed)


def _tensors(node: Node, value: object) -> list[tuple[Node, torch.Tensor]]:
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
