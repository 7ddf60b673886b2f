"""What is computed in float is not rounded on its way out, and last products give floats.

A convolution is a product of rows as well: of its pixels, or of the windows around them.

Codes there would cost accuracy and save nothing, since nobody reads them but who turns them into
floats again. It holds of graphs whose ranges are our own choice: ``gm.meta[FLOAT_RESULTS]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    constant,
    dequantized,
    finish,
    is_op,
    nodes_of,
    replace,
    sole_user,
)
from x86quant.lowering.normalize import UNARY
from x86quant.lowering.passes._epilogue import is_clamp
from x86quant.lowering.passes._real_products import real_pixels, real_product, window_of
from x86quant.lowering.passes.fuse_activation import activation_of
from x86quant.lowering.views import is_question, is_view

#: Key of a graph module's ``meta``.
FLOAT_RESULTS = "float_results"

#: By the clamp of a linear, the activation that it is.
_ACTIVATIONS = {UNBOUNDED: None, (0.0, None): "relu"}


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of values that are no longer rounded."""
    if not gm.meta.get(FLOAT_RESULTS):
        return 0
    changed = _drop_roundings(gm)
    for product in nodes_of(gm, "linear", "conv"):
        bias = constant(gm, product.kwargs["bias"])
        reals = [user for user in product.users if not is_question(user)]
        if not reals or not all(is_op(x, "dequantize") and _is_for_results(x) for x in reals):
            continue
        fits = bias is None or bias.dtype == torch.float32
        if fits and product.meta.get("bounds", UNBOUNDED) in _ACTIVATIONS:
            activation = _ACTIVATIONS[product.meta.get("bounds", UNBOUNDED)]
            if is_op(product, "linear"):
                _replace(product, real_product(gm, product, product.kwargs, activation))
            elif _is_plain(gm, product):
                window = window_of(gm, product.kwargs)
                _replace(product, real_pixels(gm, product, product.kwargs, activation, window))
            else:
                continue
            changed += 1
    return finish(gm, changed + _drop_roundings(gm))


def _is_plain(gm: GraphModule, conv: Node) -> bool:
    """Whether ``conv`` is a product of rows: neither transposed nor in groups."""
    kwargs: dict[str, Any] = conv.kwargs
    weight = constant(gm, kwargs["weight"])
    scales = constant(gm, kwargs["weight_scales"])
    return (
        weight is not None
        and scales is not None
        and scales.numel() == weight.shape[0]
        and not bool(kwargs["transposed"])
        and bool(kwargs["groups"] == 1)
        and kwargs["residual"] is None
        and len(conv.meta.get("shape") or ()) == weight.dim()
    )


def _drop_roundings(gm: GraphModule) -> int:
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        value = quantize.kwargs["x"]
        if not _rounds_results(quantize):
            continue
        if isinstance(value, Node) and _is_float(value):
            for real in list(quantize.users):
                replace(real, value)
            gm.graph.erase_node(quantize)
            changed += 1
    return changed


def _is_for_results(value: Node) -> bool:
    """Whether a float ``value`` leads to results alone, and nothing of that is int8."""
    return all(
        user.op == "output"
        or is_question(user)
        or _rounds_results(user)
        or (not is_op(user) and bool(user.users) and _is_for_results(user))
        for user in value.users
    )


def _rounds_results(quantize: Node) -> bool:
    """Whether ``quantize`` is one whose codes become reals again, and these results alone."""
    reals = list(quantize.users)
    return (
        is_op(quantize, "quantize")
        and bool(reals)
        and all(is_op(real, "dequantize") and _is_for_results(real) for real in reals)
    )


def _is_float(value: Node) -> bool:
    """Whether ``value`` is computed in float, as what a linear fuses is, or no table can do."""
    moved, unary = value, []
    while is_view(moved) or is_clamp(moved) or moved.target in UNARY:
        if not is_view(moved):
            unary.append(moved)
        (moved,) = moved.all_input_nodes[:1]
    codes = dequantized(moved)
    if codes is None:
        return moved.op != "placeholder"
    fused = [activation_of(x) is not None and x.all_input_nodes[0] is moved for x in unary]
    return fused == [True] and is_op(codes, "linear") and sole_user(codes) is moved


def _replace(product: Node, floats: Node) -> None:
    for real in [user for user in product.users if is_op(user, "dequantize")]:
        replace(real, floats)
    product.replace_all_uses_with(floats)  # by those that ask for its sizes
    product.graph.erase_node(product)
