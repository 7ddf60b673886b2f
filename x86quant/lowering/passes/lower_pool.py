"""Max, average and adaptive average pools act on codes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import dequantized, emit, finish, inherit, scale_and_zp, why
from x86quant.lowering.passes._epilogue import Lowered, lower

aten = torch.ops.aten

#: A maximum of codes is the code of the maximum.
MAX_POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
_AVG = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
_ADAPTIVE = (
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
)


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of pools lowered."""
    changed = sum(_max_pools(gm, target) for target in MAX_POOLS)
    changed += sum(lower(gm, target, _avg_pool, clamps=False) for target in _AVG)
    return changed + sum(lower(gm, target, _adaptive_pool, clamps=False) for target in _ADAPTIVE)


def _input(node: Node, dims: int) -> Node | None:
    codes = dequantized(node.args[0])
    if codes is None:
        why(node, "its input is not quantized")
        return None
    shape = codes.meta.get("shape")
    if shape is not None and len(shape) != dims + 2:
        why(node, "its input has no batch dimension")
        return None
    return codes


def _max_pools(gm: GraphModule, target: Any) -> int:
    """A maximum keeps the qparams, so it moves through the dequantize like a view."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not target:
            continue
        codes = _input(node, len(node.args[1]))
        if codes is None:
            continue
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
        with gm.graph.inserting_before(node):
            new = emit(
                gm.graph, "max_pool", node, x=codes, **dict(zip(names, node.args[1:], strict=True))
            )
            new.meta["qparams"] = codes.meta["qparams"]
            real = emit(gm.graph, "dequantize", x=new, **scale_and_zp("x", codes))
        inherit(real, node)
        node.replace_all_uses_with(real)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _avg_pool(gm: GraphModule, node: Node) -> Lowered:
    codes = _input(node, len(node.args[1]))  # type: ignore[arg-type]
    if codes is None:
        return None
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    settings = dict(zip(names, node.args[1:], strict=True))
    return "avg_pool", {"x": codes, **settings, **scale_and_zp("x", codes)}


def _adaptive_pool(gm: GraphModule, node: Node) -> Lowered:
    codes = _input(node, len(node.args[1]))  # type: ignore[arg-type]
    if codes is None:
        return None
    return "adaptive_avg_pool", {
        "x": codes,
        "output_size": node.args[1],
        **scale_and_zp("x", codes),
    }
