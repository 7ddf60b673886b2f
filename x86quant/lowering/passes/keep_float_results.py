"""What is computed in float is not rounded on its way out, and a last linear gives floats.

Codes there would cost accuracy and save nothing, since nobody reads them but who turns them into
floats again. It holds of graphs whose ranges are our own choice: ``gm.meta[FLOAT_RESULTS]``.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    constant,
    dequantized,
    emit,
    finish,
    is_op,
    nodes_of,
    replace,
    sole_user,
)
from x86quant.lowering.normalize import UNARY
from x86quant.lowering.passes._epilogue import is_clamp
from x86quant.lowering.passes.fuse_activation import activation_of
from x86quant.lowering.views import is_view

#: Key of a graph module's ``meta``.
FLOAT_RESULTS = "float_results"

#: By the clamp of a linear, the activation that it is.
_ACTIVATIONS = {UNBOUNDED: None, (0.0, None): "relu"}


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of values that are no longer rounded."""
    if not gm.meta.get(FLOAT_RESULTS):
        return 0
    changed = _drop_roundings(gm)
    for linear in nodes_of(gm, "linear"):
        bias = constant(gm, linear.kwargs["bias"])
        reals = list(linear.users)
        if not reals or not all(is_op(x, "dequantize") and _is_for_results(x) for x in reals):
            continue
        fits = bias is None or bias.dtype == torch.float32
        if fits and linear.meta.get("bounds", UNBOUNDED) in _ACTIVATIONS:
            _give_floats(gm, linear)
            changed += 1
    return finish(gm, changed)


def _drop_roundings(gm: GraphModule) -> int:
    changed = 0
    for quantize in reversed(list(nodes_of(gm, "quantize"))):
        reals = list(quantize.users)
        value = quantize.kwargs["x"]
        if not reals or not all(is_op(x, "dequantize") and _is_for_results(x) for x in reals):
            continue
        if isinstance(value, Node) and _is_float(value):
            for real in reals:
                replace(real, value)
            gm.graph.erase_node(quantize)
            changed += 1
    return changed


def _is_for_results(value: Node) -> bool:
    """Whether a float ``value`` leads to results alone, and nothing of that is int8."""
    return all(
        user.op == "output" or (not is_op(user) and bool(user.users) and _is_for_results(user))
        for user in value.users
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


def _give_floats(gm: GraphModule, linear: Node) -> None:
    kwargs = linear.kwargs
    with gm.graph.inserting_before(linear):
        floats = emit(
            gm.graph,
            "linear_real",
            x=kwargs["x"],
            weight=kwargs["weight"],
            weight_scale=kwargs["weight_scales"],
            bias=kwargs["bias"],
            x_scale=kwargs["x_scale"],
            x_zp=kwargs["x_zp"],
            activation=_ACTIVATIONS[linear.meta.get("bounds", UNBOUNDED)],
        )
    floats.meta.update(
        {k: linear.meta[k] for k in ("layer", "source", "shape") if k in linear.meta}
    )
    for real in list(linear.users):
        replace(real, floats)
    gm.graph.erase_node(linear)
