"""PReLU with a slope a channel becomes a table, an ``x86quant.affine`` and their sum: exactly that.

One of both parts is zero everywhere, and both have the codes of the result: it is rounded once.
With one slope for all it is a table like other functions (``lower_unary``).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    dequantized,
    emit,
    finish,
    inherit,
    nodes_of,
    op,
    qparams_of,
    replace,
    scale_and_zp,
    set_output,
    why,
)

_FEWEST_DIMENSIONS = 2


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of PReLUs lowered."""
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        node = quantize.kwargs["x"]
        if not isinstance(node, Node) or node.target is not torch.ops.aten.prelu.default:
            continue
        codes, slopes = dequantized(node.args[0]), constant(gm, node.args[1])
        if slopes is None or slopes.numel() == 1:
            continue
        if codes is None or len(node.meta.get("shape", ())) < _FEWEST_DIMENSIONS:
            why(node, "its input is not quantized, or has no channels")
            continue
        if len(node.users) > 1:
            why(node, "its float result is used more than once")
            continue
        with gm.graph.inserting_before(quantize):
            replace(quantize, _sum(gm, quantize, codes, slopes.float()))
        changed += 1
    return finish(gm, changed)


def _sum(gm: GraphModule, quantize: Node, codes: Node, slopes: torch.Tensor) -> Node:
    out = scale_and_zp("out", quantize)
    above = _table(gm, quantize, codes, 0.0, None)
    below = codes
    if bool((slopes < 0).any()):  # what is below zero comes out above: a clamp cannot tell it
        below = _table(gm, codes, codes, None, 0.0)
    scaled = emit(
        gm.graph,
        "affine",
        quantize,
        x=below,
        scale=add_constant(gm, gm.graph, f"{quantize.name}_slopes", slopes),
        shift=add_constant(gm, gm.graph, f"{quantize.name}_shifts", torch.zeros_like(slopes)),
        axis=1,
        **scale_and_zp("x", codes),
        **out,
    )
    if below is codes:
        scaled.meta["bounds"] = (None, 0.0)
        set_output(scaled, qparams_of(quantize))
    a, b = scale_and_zp("a", quantize), scale_and_zp("b", quantize)
    return emit(gm.graph, "add", quantize, a=above, b=scaled, **a, **b, **out)


def _table(gm: GraphModule, like: Node, codes: Node, low: float | None, high: float | None) -> Node:
    """The values of ``codes`` within bounds, in the codes of ``like``."""
    real = op("dequantize")(torch.arange(256, dtype=torch.uint8), **scale_and_zp("x", codes))
    table = op("quantize")(real.clamp(low, high), **scale_and_zp("out", like))
    node = add_constant(gm, gm.graph, f"{like.name}_table", table)
    new = inherit(emit(gm.graph, "lut", x=codes, table=node), like)
    new.meta["qparams"] = qparams_of(like)
    return new
