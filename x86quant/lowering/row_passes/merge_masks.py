"""Two masks that are added to the scores of an attention one after the other become one.

Shifted windows add the positions' bias [1, heads, N, N], then, seen as [images, windows, heads, N,
N], what hides tokens of other windows [1, windows, 1, N, N]: both are known.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant, finish
from x86quant.lowering.row_passes._values import call, is_alone, is_float32, same_sizes, value_of

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of masks merged."""
    changed = 0
    for back in list(gm.graph.nodes):
        found = _masks(gm, back)
        if found is None:
            continue
        scores, bias, windows, apart = found
        whole = value_of(back)
        with gm.graph.inserting_before(back):
            both = constant(gm, bias) + constant(gm, windows)  # type: ignore[operator]
            mask = add_constant(gm, gm.graph, "window_masks", both)
            mask.meta["val"] = torch.empty_like(both, device="meta")
            repeated = call(gm.graph, aten.expand.default, value_of(apart), mask, apart.args[1])
            mask = call(gm.graph, aten.reshape.default, whole, repeated, back.args[1])
            total = call(gm.graph, aten.add.Tensor, whole, scores, mask)
        back.replace_all_uses_with(total)
        gm.graph.erase_node(back)
        changed += 1
    return finish(gm, changed)


def _masks(gm: GraphModule, back: Node) -> tuple[Node, Node, Node, Node] | None:
    """Scores, bias, windows' mask and the scores as they meet that; ``back`` undoes the view."""
    if back.target is not aten.reshape.default:
        return None
    outer = back.args[0]
    if not isinstance(outer, Node) or outer.target is not aten.add.Tensor or outer.kwargs:
        return None
    apart, windows = outer.args
    if not isinstance(apart, Node) or not isinstance(windows, Node):
        return None
    if apart.target is not aten.reshape.default or not (is_alone(apart) and is_alone(outer)):
        return None
    inner = apart.args[0]
    if not isinstance(inner, Node) or inner.target is not aten.add.Tensor or inner.kwargs:
        return None
    scores, bias = inner.args
    if not isinstance(scores, Node) or not isinstance(bias, Node) or not is_alone(inner):
        return None
    if not is_float32(scores, bias, windows, back):
        return None
    if not (same_sizes(scores, inner) and same_sizes(inner, back) and same_sizes(apart, outer)):
        return None
    if constant(gm, bias) is None or constant(gm, windows) is None:
        return None
    seen, added = value_of(apart), value_of(windows)
    if seen is None or added is None or seen.dim() != 5 or added.dim() != 5:
        return None
    return (scores, bias, windows, apart) if added.shape[0] == added.shape[2] == 1 else None
