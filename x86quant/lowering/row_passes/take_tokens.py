"""The tokens whose logits are wanted are taken by an op of ours, without leaving native code."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from x86quant.lowering.graph_tools import emit, finish
from x86quant.lowering.row_passes._values import is_float32, value_of

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of places where tokens are taken."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.index.Tensor or len(node.args) != 2:
            continue
        x, indices = node.args
        shown, places = value_of(x), _second(indices)
        numbers = value_of(places)
        if shown is None or shown.dim() != 3 or numbers is None or not is_float32(x):
            continue
        if numbers.dtype is not torch.int64 or numbers.dim() != 1:
            continue
        with gm.graph.inserting_before(node):
            taken = emit(gm.graph, "take_tokens", node, x=x, places=places)
            taken.meta["val"] = value_of(node)
        node.replace_all_uses_with(taken)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _second(indices: Any) -> Any:
    """The index of the second dimension, if there is no other."""
    found = list(indices)
    return found[1] if len(found) == 2 and found[0] is None else None
