"""A dynamic linear becomes a product of row codes, made once for all that read a value."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import emit, finish, nodes_of
from x86quant.lowering.row_passes._values import emit_many, value_of


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of linears."""
    codes: dict[Node, tuple[Node, ...]] = {}
    changed = 0
    for linear in nodes_of(gm, "linear_dynamic"):
        arguments = dict(linear.kwargs)
        x = arguments.pop("x")
        assert isinstance(x, Node)
        with gm.graph.inserting_before(linear):
            if x not in codes:
                codes[x] = emit_many(
                    gm.graph, "quantize_rows", linear, (value_of(x), None, None), x=x
                )[1:]
            rows = dict(zip(("codes", "scale", "zero_point"), codes[x], strict=True))
            product = emit(gm.graph, "linear_rows", linear, **rows, **arguments)
        product.meta["val"] = value_of(linear)
        linear.replace_all_uses_with(product)
        gm.graph.erase_node(linear)
        changed += 1
    return finish(gm, changed)
