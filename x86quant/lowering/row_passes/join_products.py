"""Products of the same rows, such as queries, keys and values, become one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant, emit, finish, nodes_of
from x86quant.lowering.row_passes._values import call, value_of

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of products joined."""
    groups: dict[Node, list[Node]] = {}
    for product in nodes_of(gm, "linear_rows"):
        codes = product.kwargs["codes"]
        if product.kwargs["activation"] is None and isinstance(codes, Node):
            groups.setdefault(codes, []).append(product)
    changed = 0
    for products in groups.values():
        if len(products) > 1 and _join(gm, products):
            changed += len(products)
    return finish(gm, changed)


def _join(gm: GraphModule, products: list[Node]) -> bool:
    weights = [constant(gm, product.kwargs["weight"]) for product in products]
    scales = [constant(gm, product.kwargs["weight_scale"]) for product in products]
    biases = [
        None if product.kwargs["bias"] is None else constant(gm, product.kwargs["bias"])
        for product in products
    ]
    if any(w is None for w in (*weights, *scales)):
        return False
    if any(
        b is None and p.kwargs["bias"] is not None for b, p in zip(biases, products, strict=True)
    ):
        return False
    first = products[0]
    lengths = [weight.shape[0] for weight in weights if weight is not None]
    bias: Node | None = None
    with gm.graph.inserting_before(first):
        weight = _joined(gm, "joined_weight", weights)
        scale = _joined(gm, "joined_weight_scale", scales)
        if any(b is not None for b in biases):
            whole = [
                torch.zeros(n, dtype=torch.float32) if b is None else b
                for b, n in zip(biases, lengths, strict=True)
            ]
            bias = _joined(gm, "joined_bias", whole)
        kwargs = {**first.kwargs, "weight": weight, "weight_scale": scale, "bias": bias}
        product = emit(gm.graph, "linear_rows", first, **kwargs)
        for old, end, length in zip(products, accumulate(lengths), lengths, strict=True):
            part = call(gm.graph, aten.slice.Tensor, value_of(old), product, -1, end - length, end)
            old.replace_all_uses_with(part)
    for old in products:
        gm.graph.erase_node(old)
    return True


def _joined(gm: GraphModule, hint: str, tensors: Sequence[torch.Tensor | None]) -> Node:
    return add_constant(gm, gm.graph, hint, torch.cat([t for t in tensors if t is not None]))
