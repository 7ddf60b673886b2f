"""A clamp (ReLU, ReLU6, hardtanh) of an op's quantized result moves into that op.

The op's own rounding to the intermediate qparams goes with it. Of a float value a clamp goes where
the codes that it is rounded to end there as well.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    Bounds,
    absorb,
    dequantized,
    finish,
    intersect,
    is_op,
    nodes_of,
    qparams_of,
    replace,
    set_output,
    sole_user,
    stand_for,
)
from x86quant.lowering.passes._epilogue import through_clamps

#: Ops with a clamp in their epilogue.
CLAMPING = ("conv", "linear", "add", "mul", "affine")


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of clamps fused."""
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        real, bounds = through_clamps(quantize)
        producer = dequantized(real)
        if bounds == UNBOUNDED:
            continue
        if producer is None and _codes_end_there(quantize, bounds):
            quantize.update_kwarg("x", real)
            changed += 1
            continue
        if producer is None or not is_op(producer, *CLAMPING):
            continue
        if sole_user(producer) is not real or not _leads_only_to(real, quantize):
            continue
        if producer.kwargs["lut"] is not None:
            continue
        merged = intersect(producer.meta.get("bounds", UNBOUNDED), bounds)
        if qparams_of(producer) != qparams_of(quantize):
            absorb(producer, producer)
        stand_for(producer, quantize)
        producer.meta["bounds"] = merged
        set_output(producer, qparams_of(quantize))
        replace(quantize, producer)
        changed += 1
    return finish(gm, changed)


def _leads_only_to(real: Node, quantize: Node) -> bool:
    """Whether nothing else reads ``real`` or a clamp on its way: it would miss the old codes."""
    node: Node | None = real
    while node is not None and node is not quantize:
        node = sole_user(node)
    return node is quantize


def _codes_end_there(quantize: Node, bounds: Bounds) -> bool:
    """Whether codes say nothing beyond ``bounds``."""
    qparams = qparams_of(quantize)
    return qparams.clamp(bounds) == qparams.clamp(UNBOUNDED)
