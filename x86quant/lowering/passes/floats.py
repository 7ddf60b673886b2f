"""Floats at the borders of what is int8: those that need not be made, and those that are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    add_constant,
    constant,
    dequantized,
    emit,
    finish,
    is_op,
    nodes_of,
    qparams_of,
    replace,
    scale_and_zp,
    sole_user,
    why,
)
from x86quant.lowering.normalize import UNARY
from x86quant.lowering.passes._epilogue import is_clamp
from x86quant.lowering.passes.epilogues import activation_of
from x86quant.lowering.passes.products import convolution_rule, linear_rule
from x86quant.lowering.views import is_question, is_view, lies_as_in_float

aten = torch.ops.aten


def real_product(
    gm: GraphModule,
    like: Node,
    operands: Mapping[str, Any],
    activation: str | None,
    x: Node | None = None,
    weight: Node | None = None,
) -> Node:
    """``linear_real`` in front of ``like``, which stands for it.

    Args:
        gm: the graph.
        like: a float or int8 product.
        operands: x, weight, weight_scales, bias, x_scale and x_zp of it.
        activation: of the result.
        x, weight: other rows and another weight.
    """
    with gm.graph.inserting_before(like):
        floats = emit(
            gm.graph,
            "linear_real",
            x=operands["x"] if x is None else x,
            weight=operands["weight"] if weight is None else weight,
            weight_scale=operands["weight_scales"],
            bias=operands["bias"],
            x_scale=operands["x_scale"],
            x_zp=operands["x_zp"],
            activation=activation,
        )
    floats.meta.update({k: like.meta[k] for k in ("layer", "source", "shape") if k in like.meta})
    return floats


def real_pixels(
    gm: GraphModule,
    like: Node,
    operands: Mapping[str, Any],
    activation: str | None,
    window: Mapping[str, Any] | None,
) -> Node:
    """A convolution without groups as a product of pixels, between permutes that copy nothing.

    ``window`` is its stride, padding and dilation, or None where a pixel is multiplied as it is.
    """
    weight = constant(gm, operands["weight"])
    assert weight is not None
    rank = weight.dim()
    last, back = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
    pixels: Node = operands["x"]
    with gm.graph.inserting_before(like):
        if window is not None:
            taps = list(weight.shape[2:])
            pixels = emit(
                gm.graph, "patches", x=pixels, x_zp=operands["x_zp"], kernel_size=taps, **window
            )
            pixels.meta.update({k: like.meta[k] for k in ("layer",) if k in like.meta})
        rows = _permuted(gm, pixels, last)
        flat = weight.movedim(1, -1).flatten(1)
        by_pixel = add_constant(gm, gm.graph, f"{like.name}_rows", flat)
    floats = real_product(gm, like, operands, activation, rows, by_pixel)
    floats.meta["order"] = last  # what it stands for lies in
    floats.meta.pop("shape", None)
    if (shape := like.meta.get("shape")) is not None:
        floats.meta["shape"] = tuple(shape[dim] for dim in last)
    with gm.graph.inserting_before(like):
        return _permuted(gm, floats, back)


def _window(gm: GraphModule, operands: Mapping[str, Any]) -> dict[str, list[int]] | None:
    """What a convolution sees of each pixel; None if that is the pixel itself."""
    weight = constant(gm, operands["weight"])
    assert weight is not None
    stride, padding = list(operands["stride"]), list(operands["padding"])
    if {*weight.shape[2:], *stride} == {1} and not any(padding):
        return None
    return {"stride": stride, "padding": padding, "dilation": list(operands["dilation"])}


def _permuted(gm: GraphModule, value: Node, dims: tuple[int, ...]) -> Node:
    found = gm.graph.call_function(torch.permute, (value, dims))
    shape = value.meta.get("shape")
    found.meta.update({k: value.meta[k] for k in ("layer", "qparams") if k in value.meta})
    if shape is not None:
        found.meta["shape"] = tuple(shape[dim] for dim in dims)
    return found


#: Key of a graph module's ``meta``.
FLOAT_RESULTS = "float_results"

#: By the clamp of a linear, the activation that it is.
_ACTIVATIONS = {UNBOUNDED: None, (0.0, None): "relu"}


def keep_float_results(gm: GraphModule) -> int:
    """What is computed in float is not rounded on its way out, and last products give floats.

    A convolution is a product of rows as well: of its pixels, or of the windows around them.

    Codes there would cost accuracy and save nothing, since nobody reads them but who turns them
    into floats again. It holds of graphs whose ranges are our own choice:
    ``gm.meta[FLOAT_RESULTS]``.

    Returns the number of values that are no longer rounded.
    """
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
                _replace_product(product, real_product(gm, product, product.kwargs, activation))
            elif _is_plain(gm, product):
                window = _window(gm, product.kwargs)
                floats = real_pixels(gm, product, product.kwargs, activation, window)
                _replace_product(product, floats)
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


def _replace_product(product: Node, floats: Node) -> None:
    for real in [user for user in product.users if is_op(user, "dequantize")]:
        replace(real, floats)
    product.replace_all_uses_with(floats)  # by those that ask for its sizes
    product.graph.erase_node(product)


def give_floats(gm: GraphModule) -> int:
    """A linear or convolution of codes whose result is not quantized multiplies in int8 as well.

    So it is behind what reads floats: activations that come before the next range, sums in float,
    the end of a model. An activation right behind it is computed with it.

    Returns the number of products.
    """
    changed = 0
    for target, rule in (
        (aten.linear.default, linear_rule),
        (aten.convolution.default, convolution_rule),
    ):
        for node in list(gm.graph.find_nodes(op="call_function", target=target)):
            with gm.graph.inserting_before(node):
                lowered = rule(gm, node)
            if lowered is not None and _fits(gm, node, lowered[1]):
                _replace_float(gm, node, lowered[1])
                changed += 1
    return finish(gm, changed)


def _fits(gm: GraphModule, node: Node, operands: dict[str, Any]) -> bool:
    bias, scales = constant(gm, operands["bias"]), constant(gm, operands["weight_scales"])
    reason = None
    if operands.get("transposed"):
        reason = "a transposed convolution that gives floats has no int8 form"
    elif operands.get("groups", 1) != 1:
        reason = "a convolution with groups that gives floats has no int8 form"
    elif bias is not None and bias.dtype != torch.float32:
        reason = f"its bias is {bias.dtype}"
    elif scales is None or not bool((scales > 0).all()):
        reason = "its weight has scales that are not positive"
    if reason is not None:
        why(node, reason)
    return reason is None


def _replace_float(gm: GraphModule, node: Node, operands: dict[str, Any]) -> None:
    user = sole_user(node)
    activation = None if user is None else activation_of(user)
    if node.target is aten.linear.default:
        floats = real_product(gm, node, operands, activation)
    else:
        floats = real_pixels(gm, node, operands, activation, _window(gm, operands))
    if user is not None and activation is not None:
        floats.meta["source"] = user.meta.get("source", "")
        replace(user, floats)
        gm.graph.erase_node(node)
    else:
        replace(node, floats)


def remove_float_pairs(gm: GraphModule) -> int:
    """Remove ``dequantize -> quantize``: nothing if the qparams agree, else one requantize.

    Returns the number of pairs removed.
    """
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        codes = dequantized(quantize.kwargs["x"])
        if codes is None:
            continue
        if qparams_of(codes) == qparams_of(quantize):
            # The surviving codes also stand for what the pair's node stood for.
            replace(quantize, codes)
        else:
            with gm.graph.inserting_before(quantize):
                new = emit(
                    gm.graph,
                    "requantize",
                    quantize,
                    x=codes,
                    **scale_and_zp("x", codes),
                    **scale_and_zp("out", quantize),
                )
            replace(quantize, new)
        changed += 1
    return finish(gm, changed)


def lay_out_results(gm: GraphModule) -> int:
    """Results lie in memory as the float model's do: ``dequantize`` writes them so.

    Returns how many copies it saved.
    """
    changed = 0
    (output,) = gm.graph.find_nodes(op="output")
    for copy in output.all_input_nodes:
        if not lies_as_in_float(copy):
            continue
        real = copy.args[0]
        if isinstance(real, Node) and dequantized(real) is not None:
            real.update_kwarg("contiguous", True)
            replace(copy, real)
            changed += 1
    return finish(gm, changed)
