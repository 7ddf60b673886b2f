"""The mean over all positions becomes an ``adaptive_avg_pool`` to one position and a reshape."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    dequantized,
    emit,
    finish,
    inherit,
    nodes_of,
    replace,
    scale_and_zp,
    why,
)
from x86quant.lowering.passes._epilogue import through_clamps

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of means lowered."""
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        mean, bounds = through_clamps(quantize)
        if mean.target is not aten.mean.dim or bounds != UNBOUNDED or len(mean.users) > 1:
            continue
        codes = _pooled_input(mean)
        if codes is None:
            continue
        spatial = len(codes.meta["shape"]) - 2
        with gm.graph.inserting_before(quantize):
            new = emit(
                gm.graph,
                "adaptive_avg_pool",
                quantize,
                x=codes,
                output_size=[1] * spatial,
                **scale_and_zp("x", codes),
                **scale_and_zp("out", quantize),
            )
            if not mean.args[2]:
                new.meta["shape"] = (*codes.meta["shape"][:2], *[1] * spatial)
                new = inherit(gm.graph.call_function(torch.flatten, (new, 1)), quantize)
        replace(quantize, new)
        changed += 1
    return finish(gm, changed)


def _pooled_input(mean: Node) -> Node | None:
    """The codes that ``mean`` averages, if it does so over every position."""
    codes = dequantized(mean.args[0])
    if codes is None or "shape" not in codes.meta:
        why(mean, "its input is not quantized")
        return None
    rank = len(codes.meta["shape"])
    # The one dimension that torch allows for a number has no rank to be counted by.
    dims = {dim % max(rank, 1) for dim in mean.args[1]}  # type: ignore[operator,union-attr]
    if rank not in (3, 4, 5) or dims != set(range(2, rank)):
        why(mean, f"a mean over dimensions {sorted(dims)} of {rank} is not over all positions")
        return None
    return codes
