"""A product that is only quantized for the next one quantizes its rows itself."""

from __future__ import annotations

from torch.fx import GraphModule

from x86quant.lowering.graph_tools import finish, nodes_of
from x86quant.lowering.row_passes._values import emit_many, quantizer_of, take_over


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of products."""
    changed = 0
    for product in nodes_of(gm, "linear_rows"):
        quantizer = quantizer_of(product)
        if quantizer is None or len(product.users) != 1:
            continue
        with gm.graph.inserting_before(product):
            _, *results = emit_many(
                gm.graph, "linear_rows_rows", product, (None, None, None), **product.kwargs
            )
        take_over(gm, quantizer, dict(enumerate(results)))
        gm.graph.erase_node(product)
        changed += 1
    return finish(gm, changed)
