"""Norms, and the sums with residuals that they read."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish, is_op, nodes_of
from x86quant.lowering.row_passes._values import (
    argument,
    emit_many,
    is_alone,
    is_float32,
    items,
    quantizer_of,
    same_sizes,
    sizes,
    take_over,
    value_of,
)
from x86quant.ops.rows import CODES, NORMED, TOTAL

aten = torch.ops.aten


def recognise_norms(gm: GraphModule) -> int:
    """Layer norms and RMS norms over the last dimension become ``norm_rows``.

    Returns the number of norms recognised.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        found = None if node._erased or node.op != "call_function" else _norm(node)
        if found is None:
            continue
        value = value_of(node)
        with gm.graph.inserting_before(node):
            _, _, normed, *_ = emit_many(
                gm.graph, "norm_rows", node, (None, value), residual=None, outputs=NORMED, **found
            )
        total = normed.args[0]
        node.replace_all_uses_with(normed)
        gm.graph.erase_node(node)
        for user in list(total.users):  # type: ignore[union-attr]
            if not user.users:
                gm.graph.erase_node(user)
        changed += 1
    return finish(gm, changed)


def _norm(node: Node) -> dict[str, Any] | None:
    """The arguments of ``norm_rows`` that gives what ``node`` does."""
    if node.target is aten.layer_norm.default:
        return _of_op(node, "layer")
    if node.target is aten.rms_norm.default:
        return _of_op(node, "rms")
    return _spelled_rms(node)


def _of_op(node: Node, kind: str) -> dict[str, Any] | None:
    x, shape = node.args[0], node.args[1]
    weight = argument(node, 2, "weight")
    bias = argument(node, 3, "bias") if kind == "layer" else None
    eps = argument(node, 4, "eps", 1e-5) if kind == "layer" else argument(node, 3, "eps")
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    found = {"x": x, "norm_weight": weight, "norm_bias": bias, "eps": eps, "kind": kind}
    fits = isinstance(shape, list | tuple) and len(shape) == 1 and type(shape[0]) is int
    return found if fits and _is_rows(x, weight, bias) else None


def _is_rows(x: object, weight: object, bias: object) -> bool:
    """Whether all are float32, and weight and bias constants, one number a feature of ``x``."""
    whole = sizes(x)
    if not whole or not is_float32(x):
        return False
    return all(
        w is None
        or (isinstance(w, Node) and w.op == "get_attr" and is_float32(w) and sizes(w) == whole[-1:])
        for w in (weight, bias)
    )


def _spelled_rms(node: Node) -> dict[str, Any] | None:
    """``weight * (x * rsqrt(mean(x ** 2, -1) + eps))``, as transformers write it."""
    if node.target is not aten.mul.Tensor:
        return None
    for weight, normed in (node.args[:2], node.args[1::-1]):
        if not isinstance(weight, Node) or weight.op != "get_attr" or not isinstance(normed, Node):
            continue
        found = _without_weight(normed)
        if found is None or len(normed.users) != 1 or not same_sizes(node, normed):
            continue
        x, eps = found
        if _is_rows(x, weight, None) and is_float32(node):
            return {
                "x": x, "norm_weight": weight, "norm_bias": None, "eps": eps, "kind": "rms"
            }  # fmt: skip
    return None


def _without_weight(node: Node) -> tuple[Node, float] | None:
    """What ``x * rsqrt(mean(x ** 2, -1) + eps)`` norms, and its eps."""
    if node.target is not aten.mul.Tensor:
        return None
    for x, inverse in (node.args[:2], node.args[1::-1]):
        if not isinstance(inverse, Node) or inverse.target is not aten.rsqrt.default:
            continue
        mean_plus = inverse.args[0]
        if not isinstance(mean_plus, Node) or mean_plus.target is not aten.add.Tensor:
            continue
        mean, eps = mean_plus.args[:2]
        if not isinstance(mean, Node) or not isinstance(eps, float) or mean_plus.kwargs:
            continue
        if mean.target is not aten.mean.dim or argument(mean, 3, "dtype") is not None:
            continue
        square, dims, keep = mean.args[0], mean.args[1], argument(mean, 2, "keepdim", False)
        if not isinstance(square, Node) or not isinstance(x, Node) or keep is not True:
            continue
        rank = len(sizes(square) or ())
        if list(dims) not in ([-1], [rank - 1]):  # type: ignore[arg-type]
            continue
        if _squares(square) is x and is_float32(x):
            return x, eps
    return None


def _squares(node: Node) -> object:
    """What ``node`` squares."""
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return node.args[0]
    if node.target is aten.square.default:
        return node.args[0]
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        return node.args[0]
    return None


def fuse_norms(gm: GraphModule) -> int:
    """A product, the sum with a residual, the norm of that and its row codes become one op.

    Returns the number of norms that took something in.
    """
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
        _fuse_norm(gm, norm, normed, summed, product, quantizer)
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


def _fuse_norm(
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


def fuse_residuals(gm: GraphModule) -> int:
    """A product and the sum with a residual become one op where no norm reads the sum.

    Returns the number of sums.
    """
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
