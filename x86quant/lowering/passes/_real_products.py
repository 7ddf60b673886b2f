"""Products of codes that end as floats: linears, and convolutions as products of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant, emit


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


def window_of(gm: GraphModule, operands: Mapping[str, Any]) -> dict[str, list[int]] | None:
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
