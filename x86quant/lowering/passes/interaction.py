"""The interaction of lookups in a recommender."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import emit, finish, is_op, nodes_of, replace, sole_user
from x86quant.lowering.views import is_reshape

_FORMAT = 7


def fuse_interaction(gm: GraphModule) -> int:
    """Lookups, their interaction with a dense vector and ``quantize`` become one op.

    Returns the number of interactions fused.
    """
    changed = 0
    for node in nodes_of(gm, "quantize"):
        product: Any = node.kwargs["x"]
        if not is_op(product, "interact") or sole_user(product) is not node:
            continue
        bags: Any = product.kwargs["vectors"]
        while isinstance(bags, Node) and is_reshape(bags) and sole_user(bags) is not None:
            bags = bags.args[0]
        if not is_op(bags, "embedding_bags") or sole_user(bags) is None:
            continue
        # Rows of one size: then the reshape, whose last size the interaction checks, parts tables.
        if len(set(bags.kwargs["formats"][::_FORMAT])) > 1:
            continue
        with gm.graph.inserting_before(node):
            fused = emit(gm.graph, "interact_bags", node, **_arguments(node, product, bags))
        fused.meta["layer"] = product.meta.get("layer", fused.meta.get("layer"))
        replace(node, fused)
        changed += 1
    return finish(gm, changed)


def _arguments(node: Node, product: Node, bags: Node) -> dict[str, Any]:
    codes = {name: node.kwargs[name] for name in ("out_scale", "out_zp")}
    given = {name: product.kwargs[name] for name in ("dense", "places")}
    return {**given, **bags.kwargs, **codes}
