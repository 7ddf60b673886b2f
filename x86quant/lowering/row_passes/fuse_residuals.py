"""A product and the sum with a residual become one op where no norm reads the sum."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from x86quant.lowering.graph_tools import finish
from x86quant.lowering.row_passes._values import emit_many, value_of
from x86quant.lowering.row_passes.fuse_norms import product_in, sum_of_two
from x86quant.ops.rows import TOTAL


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of sums."""
    changed = 0
    for node in list(gm.graph.nodes):
        summed = sum_of_two(node)
        product: Any = None if summed is None else product_in(summed)
        if summed is None or product is None:
            continue
        first, second = summed.args[:2]
        own = {key: value for key, value in product.kwargs.items() if key != "activation"}
        with gm.graph.inserting_before(summed):
            _, total = emit_many(
                gm.graph, "linear_rows_norm", product, (value_of(summed),), **own,
                residual=first if second is product else second, norm_weight=None,
                norm_bias=None, eps=0.0, kind="layer", outputs=TOTAL,
            )  # fmt: skip
        summed.replace_all_uses_with(total)
        gm.graph.erase_node(summed)
        gm.graph.erase_node(product)
        changed += 1
    return finish(gm, changed)
