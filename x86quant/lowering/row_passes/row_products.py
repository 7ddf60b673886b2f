"""Products of rows, and the codes that they read and give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant, emit, finish, nodes_of
from x86quant.lowering.row_passes._values import (
    argument,
    call,
    emit_many,
    is_float32,
    quantizer_of,
    take_over,
    value_of,
)

aten = torch.ops.aten


# x[:, None] in the ways that export spells it.
_COLUMN = (aten.unsqueeze.default, aten.reshape.default, aten.view.default)


def recognise_products(gm: GraphModule) -> int:
    """A float linear by a weight that is computed from int8 codes becomes the int8 one.

    So it looks in a graph where a module gives its layer's weight to ``F.linear``, as torchvision's
    Swin does with those of its attention.

    Returns the number of linears.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.linear.default or not is_float32(node, node.args[0]):
            continue
        found = _codes(gm, node.args[1])
        if found is None:
            continue
        weight, scale = found
        bias = argument(node, 2, "bias")
        with gm.graph.inserting_before(node):
            product = emit(
                gm.graph, "linear_dynamic", node, x=node.args[0], weight=weight,
                weight_scale=scale, bias=bias,
            )  # fmt: skip
        product.meta["val"] = value_of(node)
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _codes(gm: GraphModule, weight: object) -> tuple[Node, Node] | None:
    """Codes [N, K] and scales [N] whose product ``weight`` is."""
    if not isinstance(weight, Node) or weight.target is not aten.mul.Tensor:
        return None
    codes, column = weight.args
    if not isinstance(column, Node) or column.target not in _COLUMN:
        return None
    scale = column.args[0]
    values, scales = constant(gm, codes), constant(gm, scale)
    if values is None or scales is None or values.dtype != torch.int8 or values.dim() != 2:
        return None
    seen = value_of(column)
    if scales.shape != values.shape[:1] or scales.dtype != torch.float32:
        return None
    if seen is None or seen.shape != (len(values), 1):
        return None
    assert isinstance(codes, Node)
    assert isinstance(scale, Node)
    return codes, scale


def share_row_codes(gm: GraphModule) -> int:
    """A dynamic linear becomes a product of row codes, made once for all that read a value.

    One that reads the features of a value in another order reads its codes in that order: rows have
    the same scales and zero points in any. Linears that share an order share those codes.

    Returns the number of linears.
    """
    codes: dict[Node, tuple[Node, ...]] = {}
    reordered: dict[Node, list[tuple[torch.Tensor, Node]]] = {}
    changed = 0
    for linear in nodes_of(gm, "linear_dynamic"):
        arguments = dict(linear.kwargs)
        given = arguments.pop("x")
        assert isinstance(given, Node)
        found = _reordered(gm, given)
        x, order = (given, None) if found is None else found
        with gm.graph.inserting_before(linear):
            if x not in codes:
                codes[x] = emit_many(
                    gm.graph, "quantize_rows", linear, (value_of(x), None, None), x=x
                )[1:]
            rows = dict(zip(("codes", "scale", "zero_point"), codes[x], strict=True))
            if order is not None:
                known = reordered.setdefault(x, [])
                rows["codes"] = _codes_in_order(gm, linear, rows["codes"], order, known)
            product = emit(gm.graph, "linear_rows", linear, **rows, **arguments)
        product.meta["val"] = value_of(linear)
        linear.replace_all_uses_with(product)
        gm.graph.erase_node(linear)
        changed += 1
    return finish(gm, changed)


def _reordered(gm: GraphModule, x: Node) -> tuple[Node, torch.Tensor] | None:
    """The value whose features ``x`` has in another order, and that order: GPTQ's act-order."""
    if x.target is not aten.index_select.default or not is_float32(x, x.args[0]):
        return None
    source, dim, index = x.args
    value, order = value_of(source), constant(gm, index)
    assert value is not None
    if dim not in (-1, value.dim() - 1) or order is None or order.shape != value.shape[-1:]:
        return None
    if not torch.equal(order.sort().values, torch.arange(len(order), dtype=order.dtype)):
        return None  # without some features a row may have other scales
    assert isinstance(source, Node)
    return source, order.to(torch.int32)


def _codes_in_order(
    gm: GraphModule,
    like: Node,
    codes: Node,
    order: torch.Tensor,
    known: list[tuple[torch.Tensor, Node]],
) -> Node:
    """``codes`` in this ``order``, by one node for all that want it; ``known`` are those nodes."""
    for other, node in known:
        if torch.equal(order, other):
            return node
    constant_order = add_constant(gm, gm.graph, "order", order)
    node = emit(gm.graph, "reorder_codes", like, codes=codes, order=constant_order)
    node.meta["val"] = value_of(codes)
    known.append((order, node))
    return node


def quantize_products(gm: GraphModule) -> int:
    """A product that is only quantized for the next one quantizes its rows itself.

    Returns the number of products.
    """
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


def join_products(gm: GraphModule) -> int:
    """Products of the same rows, such as queries, keys and values, become one.

    Returns the number of products joined.
    """
    groups: dict[Any, list[tuple[Node, _Constants]]] = {}
    for product in nodes_of(gm, "linear_rows"):
        codes = product.kwargs["codes"]
        if product.kwargs["activation"] is not None or not isinstance(codes, Node):
            continue
        if (given := _constants(gm, product)) is not None:
            # Weights of 8 and of 4 bits, or in other groups, are no rows of one matrix.
            rows = [(x.dtype, x.shape[1:]) for x in (given.weight, given.scale)]
            groups.setdefault((codes, *rows), []).append((product, given))
    changed = 0
    for products in groups.values():
        if len(products) > 1:
            _join_to_one(gm, products)
            changed += len(products)
    return finish(gm, changed)


class _Constants(NamedTuple):
    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


def _constants(gm: GraphModule, product: Node) -> _Constants | None:
    """What ``product`` multiplies by and adds, if all of it is constant."""
    weight = constant(gm, product.kwargs["weight"])
    scale = constant(gm, product.kwargs["weight_scale"])
    biased = product.kwargs["bias"] is not None
    bias = constant(gm, product.kwargs["bias"]) if biased else None
    if weight is None or scale is None or (biased and bias is None):
        return None
    return _Constants(weight, scale, bias)


def _join_to_one(gm: GraphModule, joined: list[tuple[Node, _Constants]]) -> None:
    products = [product for product, _ in joined]
    weights, scales, biases = zip(*(given for _, given in joined), strict=True)
    first = products[0]
    lengths = [weight.shape[0] for weight in weights]
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


def _joined(gm: GraphModule, hint: str, tensors: Sequence[torch.Tensor]) -> Node:
    return add_constant(gm, gm.graph, hint, torch.cat([*tensors]))
