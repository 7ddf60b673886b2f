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
    leads_only,
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


_OPERANDS: tuple[str, ...] = ("x", "bias", "x_scale", "x_zp")
#: What a convolution is given besides.
_WINDOW = ("stride", "padding", "dilation")


def _real_product(
    gm: GraphModule, like: Node, operands: Mapping[str, Any], activation: str | None
) -> Node:
    """``linear_real`` or ``conv_real`` in front of ``like``, for which it stands.

    Args:
        gm: the graph.
        like: a float or int8 product, a convolution without groups among them.
        operands: what the int8 one is given.
        activation: of the result.
    """
    op, names, weight = "linear_real", _OPERANDS, operands["weight"]
    with gm.graph.inserting_before(like):
        if "stride" in operands:
            op, names = "conv_real", (*_OPERANDS, *_WINDOW)
            taps = constant(gm, weight)
            assert taps is not None
            last = taps.movedim(1, -1).contiguous()
            weight = add_constant(gm, gm.graph, f"{like.name}_taps", last)
        given = {name: operands[name] for name in names}
        scales = operands["weight_scales"]
        floats = emit(
            gm.graph, op, weight=weight, weight_scale=scales, activation=activation, **given
        )
    floats.meta.update({k: like.meta[k] for k in ("layer", "source", "shape") if k in like.meta})
    return floats


#: Key of a graph module's ``meta``.
FLOAT_RESULTS = "float_results"

#: By the clamp of a linear, the activation that it is.
_ACTIVATIONS = {UNBOUNDED: None, (0.0, None): "relu"}


def keep_float_results(gm: GraphModule) -> int:
    """What is computed in float is not rounded on its way out, and last products give floats.

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
        fits = fits and product.kwargs["slopes"] is None
        if fits and product.meta.get("bounds", UNBOUNDED) in _ACTIVATIONS:
            activation = _ACTIVATIONS[product.meta.get("bounds", UNBOUNDED)]
            if is_op(product, "conv") and not _is_plain(gm, product):
                continue
            _replace_product(product, _real_product(gm, product, product.kwargs, activation))
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
    return leads_only(value, _ends_in_results)


def _ends_in_results(reader: Node) -> bool | None:
    if reader.op == "output" or is_question(reader):
        return True
    if is_op(reader):
        return None if is_op(reader, "dequantize") or _is_for_reals(reader) else False
    return None if reader.users else False


def _rounds_results(quantize: Node) -> bool:
    """Whether ``quantize`` is one whose codes become reals again, and these results alone."""
    return _is_for_reals(quantize) and _is_for_results(quantize)


def _is_for_reals(quantize: Node) -> bool:
    reals = quantize.users
    return (
        is_op(quantize, "quantize") and bool(reals) and all(is_op(x, "dequantize") for x in reals)
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
    floats = _real_product(gm, node, operands, activation)
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
    """Results lie in memory as the float model's do: what gives floats writes them so.

    Returns how many copies it saved.
    """
    changed = 0
    (output,) = gm.graph.find_nodes(op="output")
    for copy in output.all_input_nodes:
        if not lies_as_in_float(copy):
            continue
        real = copy.args[0]
        if isinstance(real, Node) and is_op(
            real, "conv_real", "dequantize", "float_conv", "lut_real"
        ):
            real.update_kwarg("contiguous", True)
            replace(copy, real)
            changed += 1
    return finish(gm, changed)
