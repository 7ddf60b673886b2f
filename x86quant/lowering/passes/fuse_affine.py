"""A per-channel affine map of a convolution's or linear's result moves into its scales and bias."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    absorb,
    add_constant,
    constant,
    finish,
    is_op,
    nodes_of,
    qparams_of,
    replace,
    set_kwargs,
    set_output,
    sole_user,
    stand_for,
)
from x86quant.lowering.passes._weights import scaled_weight


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of affine maps fused."""
    changed = sum(_fuse(gm, node) for node in nodes_of(gm, "affine"))
    return finish(gm, changed)


def _fuse(gm: GraphModule, affine: Node) -> int:
    layer = affine.kwargs["x"]
    assert isinstance(layer, Node)
    if not _is_open(layer) or sole_user(layer) is not affine:
        return 0
    if layer.kwargs.get("transposed"):
        return 0
    weight, scales, bias, scale, shift = (
        constant(gm, value)
        for value in (
            *(layer.kwargs[name] for name in ("weight", "weight_scales", "bias")),
            affine.kwargs["scale"],
            affine.kwargs["shift"],
        )
    )
    assert weight is not None
    assert scales is not None
    assert scale is not None
    assert shift is not None
    if scale.numel() > 1 and affine.kwargs["axis"] != _channel_axis(layer):
        return 0
    if bias is not None and bias.dtype == torch.int32:
        return 0
    scaled = scaled_weight(weight, scales, scale, 0)
    if scaled is None:
        return 0
    constants = dict(
        zip(
            ("weight", "weight_scales", "bias"),
            (
                *scaled,
                (shift if bias is None else bias * scale + shift).expand(len(weight)).contiguous(),
            ),
            strict=True,
        )
    )
    with gm.graph.inserting_before(layer):
        set_kwargs(
            layer,
            **{
                name: add_constant(gm, gm.graph, f"{layer.name}_{name}", value)
                for name, value in constants.items()
            },
        )
    absorb(layer, layer, gain=float(scale.abs().max()))
    stand_for(layer, affine)
    layer.meta["bounds"] = affine.meta.get("bounds", UNBOUNDED)
    set_output(layer, qparams_of(affine))
    set_kwargs(layer, lut=affine.kwargs["lut"])
    replace(affine, layer)
    return 1


def _is_open(layer: Node) -> bool:
    """A convolution or linear with nothing in its epilogue yet."""
    return (
        is_op(layer, "conv", "linear")
        and layer.meta.get("bounds", UNBOUNDED) == UNBOUNDED
        and layer.kwargs["residual"] is None
        and layer.kwargs["lut"] is None
    )


def _channel_axis(layer: Node) -> int:
    return 1 if is_op(layer, "conv") else len(layer.meta["shape"]) - 1
