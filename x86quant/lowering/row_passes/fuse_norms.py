"""A product, the sum with a residual, the norm of that and its row codes become one op."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish, is_op, nodes_of
from x86quant.lowering.row_passes._values import (
    emit_many,
    is_alone,
    is_float32,
    items,
    quantizer_of,
    same_sizes,
    take_over,
    value_of,
)
from x86quant.ops.rows import CODES, NORMED, TOTAL

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of norms that took something in."""
    changed = 0
    for norm in nodes_of(gm, "norm_rows"):
        normed = items(norm)[1]
        summed = sum_of_two(norm.kwargs["x"])
        quantizer = quantizer_of(normed)
        product = norm.kwargs["x"] if summed is None else product_in(summed)
        if not _is_free_product(product):
            product = None
        if summed is None and product is None and quantizer is None:
            continue
        changed += 1
        _fuse(gm, norm, normed, summed, product, quantizer)
    return finish(gm, changed)


def sum_of_two(value: object) -> Node | None:
    """``value``, if it is the sum of two tensors of its own sizes."""
    if not isinstance(value, Node) or value.target is not aten.add.Tensor or value.kwargs:
        return None
    a, b = value.args[:2]
    fits = same_sizes(a, value) and same_sizes(b, value) and is_float32(a, b, value)
    return value if fits and a is not b else None


def product_in(summed: Node) -> object:
    """The product that ``summed`` alone reads, with nothing behind it; None if there is none."""
    return next((x for x in summed.args if _is_free_product(x)), None)


def _is_free_product(value: object) -> bool:
    """Whether ``value`` is a product that only one node reads, with nothing behind it."""
    if not isinstance(value, Node) or not is_op(value, "linear_rows"):
        return False
    return is_alone(value) and value.kwargs["activation"] is None


def _fuse(
    gm: GraphModule,
    norm: Node,
    normed: Node,
    summed: Node | None,
    product: Any,
    quantizer: Node | None,
) -> None:
    kept = dict(norm.kwargs)
    x = kept.pop("x")
    residual = None
    if summed is not None:
        first, second = summed.args[:2]
        x, residual = (second, first) if second is product else (first, second)
    # What else reads the sum may stand before the norm.
    place = norm if summed is None else summed
    total_read = summed is not None and len(summed.users) > 1
    normed_read = any(user is not quantizer for user in normed.users)
    outputs = TOTAL * total_read + NORMED * normed_read + CODES * (quantizer is not None)
    kept |= {"residual": residual, "outputs": outputs}
    if product is None:
        name, own = "norm_rows", {"x": x}
    else:
        own = {key: value for key, value in product.kwargs.items() if key != "activation"}
        name = "linear_rows_norm"
    value = value_of(normed)
    like = norm if product is None else product
    with gm.graph.inserting_after(place):
        anchor = gm.graph.call_function(aten.alias.default, (place,))  # a place to insert before
    with gm.graph.inserting_before(anchor):
        _, *results = emit_many(
            gm.graph, name, like, (value, value, None, None, None), **own, **kept
        )
    gm.graph.erase_node(anchor)
    if quantizer is not None:
        take_over(gm, quantizer, {n: results[2 + n] for n in range(3)})
    normed.replace_all_uses_with(results[1])
    gm.graph.erase_node(normed)
    gm.graph.erase_node(norm)
    if summed is not None:
        summed.replace_all_uses_with(results[0])
        gm.graph.erase_node(summed)
    if product is not None:
        gm.graph.erase_node(product)
    for item in results:
        if not item.users:
            gm.graph.erase_node(item)
