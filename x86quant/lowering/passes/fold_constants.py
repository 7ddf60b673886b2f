"""Compute once what depends on constants only. Int8 weights stay as they are."""

from __future__ import annotations

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
        value = node.target(*args, **kwargs)
        with gm.graph.inserting_before(node):
            new = inherit(add_constant(gm, gm.graph, node.name, value), node)
        if "why" in node.meta:
            new.meta["why"] = node.meta["why"]
        replace(node, new)
        changed += 1
    return finish(gm, changed)


def _foldable(gm: GraphModule, node: Node) -> bool:
    """An aten op or one of ours that reads constant tensors only."""
    inputs = node.all_input_nodes
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and bool(inputs)
        and all(constant(gm, value) is not None for value in inputs)
        and len(node.target._schema.returns) == 1
    )
