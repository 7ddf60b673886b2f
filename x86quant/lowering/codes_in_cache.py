"""A decoder's graph with a cache of int8 codes in place of one of floats."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from x86quant.lowering.graph_tools import emit, is_op
from x86quant.lowering.row_passes.attend_to_cache import CACHE

#: The input that is added behind the others.
SCALES = "scales"


def with_int8_cache(gm: GraphModule) -> GraphModule:
    """``gm``, whose attention extends a cache, with one of codes and, as its last input, scales.

    It has the tensors of ``gm``, which stays as it is.
    """
    graph = Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copied))
    cache = next(n for n in graph.nodes if n.op == "placeholder" and n.target == CACHE)
    cache.meta.pop("val", None)  # of floats
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        scales = graph.placeholder(SCALES)
    for node in [*graph.nodes]:
        if not is_op(node, "cached_attention"):
            continue
        with graph.inserting_before(node):
            out = emit(graph, "int8_cached_attention", node, **node.kwargs, scales=scales)
        if "val" in node.meta:
            out.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(out)
        graph.erase_node(node)
    return GraphModule(gm, graph)
