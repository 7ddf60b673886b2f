"""A sum with a convolution's or linear's result moves into that layer's epilogue."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    absorb,
    emit,
    finish,
    is_op,
    nodes_of,
    replace,
    sole_user,
)

_FROM_SUM = ("out_scale", "out_zp", "lo", "hi", "lut")


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of sums fused."""
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    changed = 0
    for node in nodes_of(gm, "add"):
        sides = [side for side in ("a", "b") if _is_open(node.kwargs[side], node)]
        if not sides:
            continue
        # Of two layers the later one takes the sum: the other's result exists by then.
        side = max(sides, key=lambda name: order.get(_node(node.kwargs[name]), -1))
        _fuse(gm, node, side)
        changed += 1
    return finish(gm, changed)


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _is_open(value: Any, node: Node) -> bool:
    """A layer that only ``node`` reads, of the sum's shape, with nothing in its epilogue yet."""
    layer = _node(value)
    return (
        is_op(layer, "conv", "linear")
        and sole_user(layer) is node
        and layer.meta.get("bounds", UNBOUNDED) == UNBOUNDED
        and layer.kwargs["residual"] is None
        and layer.kwargs["lut"] is None
        and node.kwargs["a"] is not node.kwargs["b"]
        and "shape" in node.meta
        and all(
            _node(node.kwargs[side]).meta.get("shape") == node.meta["shape"] for side in ("a", "b")
        )
    )


def _fuse(gm: GraphModule, node: Node, side: str) -> None:
    layer = _node(node.kwargs[side])
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
