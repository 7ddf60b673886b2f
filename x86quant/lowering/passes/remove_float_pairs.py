"""Remove ``dequantize -> quantize``: nothing if the qparams agree, else one requantize."""

from __future__ import annotations

from torch.fx import GraphModule

from x86quant.lowering.graph_tools import (
    dequantized,
    emit,
    finish,
    nodes_of,
    qparams_of,
    replace,
    scale_and_zp,
)


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of pairs removed."""
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        codes = dequantized(quantize.kwargs["x"])
        if codes is None:
            continue
        if qparams_of(codes) == qparams_of(quantize):
            # The surviving codes also stand for what the pair's node stood for.
            replace(quantize, codes)
        else:
            with gm.graph.inserting_before(quantize):
                new = emit(
                    gm.graph,
                    "requantize",
                    quantize,
                    x=codes,
                    **scale_and_zp("x", codes),
                    **scale_and_zp("out", quantize),
                )
            replace(quantize, new)
        changed += 1
    return finish(gm, changed)
