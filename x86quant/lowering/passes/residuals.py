"""Sums with the result of a layer become that layer with a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    absorb,
    dequantized,
    emit,
    finish,
    nodes_of,
    replace,
    scale_and_zp,
    sole_user,
)
from x86quant.lowering.passes._epilogue import Lowered, Rule, lower
from x86quant.lowering.passes.epilogues import has_no_epilogue
from x86quant.lowering.passes.products import convolution_rule, linear_rule

aten = torch.ops.aten


LAYERS: dict[Any, Rule] = {
    aten.convolution.default: convolution_rule,
    aten.linear.default: linear_rule,
}


def lower_residual(gm: GraphModule) -> int:
    """The sum of a quantized tensor and a layer's float result becomes that layer with a residual.

    PT2E does not quantize what stands between the two. Nor does the layer with its sum in the
    epilogue, so that nothing is rounded that was not rounded before.

    Returns the number of sums lowered.
    """
    return lower(gm, aten.add.Tensor, residual_rule)


def residual_rule(gm: GraphModule, node: Node) -> Lowered:
    """The layer of ours that adds what ``node`` does, a sum with a layer's float result."""
    for layer, other in (node.args[:2], node.args[1::-1]):
        codes = dequantized(other)
        if not isinstance(layer, Node) or codes is None or len(layer.users) > 1:
            continue
        rule = LAYERS.get(layer.target)
        shapes = {x.meta.get("shape") for x in (layer, codes, node)}
        if rule is None or len(shapes) > 1 or None in shapes:
            continue
        found = rule(gm, layer)
        if found is not None:
            name, settings = found
            node.meta["layer"] = layer.meta.get("layer", node.meta.get("layer"))
            return name, {**settings, "residual": codes, **scale_and_zp("residual", codes)}
    return None


_FROM_SUM = ("out_scale", "out_zp", "lo", "hi", "lut")


def fuse_residual(gm: GraphModule) -> int:
    """A sum with a convolution's or linear's result moves into that layer's epilogue.

    Returns the number of sums fused.
    """
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    changed = 0
    for node in nodes_of(gm, "add"):
        sides = [side for side in ("a", "b") if _is_open(node.kwargs[side], node)]
        if not sides:
            continue
        # Of two layers the later one takes the sum: the other's result exists by then.
        side = max(sides, key=lambda name: order.get(_as_node(node.kwargs[name]), -1))
        _fuse_sum(gm, node, side)
        changed += 1
    return finish(gm, changed)


def _as_node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _is_open(value: Any, node: Node) -> bool:
    """A layer that only ``node`` reads, of the sum's shape, with nothing in its epilogue yet."""
    layer = _as_node(value)
    return (
        has_no_epilogue(layer)
        and sole_user(layer) is node
        and node.kwargs["a"] is not node.kwargs["b"]
        and "shape" in node.meta
        and all(
            _as_node(node.kwargs[side]).meta.get("shape") == node.meta["shape"]
            for side in ("a", "b")
        )
    )


def _fuse_sum(gm: GraphModule, node: Node, side: str) -> None:
    layer = _as_node(node.kwargs[side])
    other = "b" if side == "a" else "a"
    settings = {
        **layer.kwargs,
        **{name: node.kwargs[name] for name in _FROM_SUM},
        "residual": node.kwargs[other],
        "residual_scale": node.kwargs[f"{other}_scale"],
        "residual_zp": node.kwargs[f"{other}_zp"],
    }
    with gm.graph.inserting_before(node):
        new = emit(gm.graph, layer.target._schema.name.split("::")[1], node, **settings)  # type: ignore[union-attr]
    new.meta["qparams"] = node.meta["qparams"]
    absorb(new, layer)
    if "layer" in layer.meta:
        new.meta["layer"] = layer.meta["layer"]
    replace(node, new)
