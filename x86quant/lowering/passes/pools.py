"""Pools, means over all positions, and interpolation, on codes."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    UNBOUNDED,
    dequantized,
    emit,
    finish,
    inherit,
    nodes_of,
    replace,
    scale_and_zp,
    why,
)
from x86quant.lowering.passes._epilogue import Lowered, lower, through_clamps
from x86quant.lowering.views import computes_a_size, is_size_tuple

aten = torch.ops.aten


#: A maximum of codes is the code of the maximum.
MAX_POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
_AVG = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
_ADAPTIVE = (
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
)


def lower_pool(gm: GraphModule) -> int:
    """Max, average and adaptive average pools act on codes.

    Returns the number of pools lowered.
    """
    changed = sum(_max_pools(gm, target) for target in MAX_POOLS)
    changed += sum(lower(gm, target, _avg_pool, clamps=False) for target in _AVG)
    return changed + sum(lower(gm, target, _adaptive_pool, clamps=False) for target in _ADAPTIVE)


def _codes_in(node: Node, dims: int) -> Node | None:
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
        codes = _codes_in(node, len(node.args[1]))
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
    codes = _codes_in(node, len(node.args[1]))  # type: ignore[arg-type]
    if codes is None:
        return None
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    settings = dict(zip(names, node.args[1:], strict=True))
    return "avg_pool", {"x": codes, **settings, **scale_and_zp("x", codes)}


def _adaptive_pool(gm: GraphModule, node: Node) -> Lowered:
    codes = _codes_in(node, len(node.args[1]))  # type: ignore[arg-type]
    if codes is None:
        return None
    return "adaptive_avg_pool", {
        "x": codes,
        "output_size": node.args[1],
        **scale_and_zp("x", codes),
    }


def lower_maximum(gm: GraphModule) -> int:
    """The maximum over positions becomes an ``adaptive_max_pool`` to one, and a squeeze.

    Returns the number of maxima lowered.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.amax.default:
            continue
        x, dims, keepdim = node.args
        codes = dequantized(x)
        rank = len(codes.meta.get("shape", ())) if codes is not None else 0
        if codes is None or rank not in (3, 4, 5):
            why(node, "its input is not quantized" if codes is None else "it has no positions")
            continue
        over = {dim % rank for dim in dims}
        if min(over) < 2:
            why(node, f"a maximum over dimensions {sorted(over)} of {rank} is not over positions")
            continue
        sizes = [1 if dim in over else -1 for dim in range(2, rank)]
        with gm.graph.inserting_before(node):
            new = emit(gm.graph, "adaptive_max_pool", node, x=codes, output_size=sizes)
            new.meta["qparams"] = codes.meta["qparams"]
            new.meta["shape"] = (
                *codes.meta["shape"][:2],
                *(1 if dim in over else codes.meta["shape"][dim] for dim in range(2, rank)),
            )
            real = emit(gm.graph, "dequantize", x=new, **scale_and_zp("x", codes))
            if not keepdim:
                real.meta["shape"] = new.meta["shape"]
                real = gm.graph.call_function(torch.squeeze, (real, tuple(sorted(over))))
        inherit(real, node)
        node.replace_all_uses_with(real)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def lower_mean(gm: GraphModule) -> int:
    """The mean over positions becomes an ``adaptive_avg_pool`` that leaves one, and a reshape.

    Returns the number of means lowered.
    """
    changed = 0
    for quantize in nodes_of(gm, "quantize"):
        mean, bounds = through_clamps(quantize)
        if mean.target is not aten.mean.dim or bounds != UNBOUNDED or len(mean.users) > 1:
            continue
        found = _pooled_input(mean)
        if found is None:
            continue
        codes, dims = found
        shape = codes.meta["shape"]
        with gm.graph.inserting_before(quantize):
            new = emit(
                gm.graph,
                "adaptive_avg_pool",
                quantize,
                x=codes,
                output_size=[1 if dim in dims else -1 for dim in range(2, len(shape))],
                **scale_and_zp("x", codes),
                **scale_and_zp("out", quantize),
            )
            if not mean.args[2]:
                new.meta["shape"] = tuple(1 if dim in dims else x for dim, x in enumerate(shape))
                flat = len(dims) == len(shape) - 2
                view = (torch.flatten, 1) if flat else (torch.squeeze, tuple(sorted(dims)))
                new = inherit(gm.graph.call_function(view[0], (new, view[1])), quantize)
        replace(quantize, new)
        changed += 1
    return finish(gm, changed)


def _pooled_input(mean: Node) -> tuple[Node, set[int]] | None:
    """The codes that ``mean`` averages over some or all dimensions of positions, and which."""
    codes = dequantized(mean.args[0])
    if codes is None or "shape" not in codes.meta:
        why(mean, "its input is not quantized")
        return None
    rank = len(codes.meta["shape"])
    # The one dimension that torch allows for a number has no rank to be counted by.
    over: Any = mean.args[1]
    dims = {int(dim) % max(rank, 1) for dim in over}
    if rank not in (3, 4, 5) or not dims or not dims <= set(range(2, rank)):
        why(mean, f"a mean over dimensions {sorted(dims)} of {rank} is not over positions alone")
        return None
    return codes, dims


def lower_upsample(gm: GraphModule) -> int:
    """``F.interpolate`` of a quantized tensor becomes ``x86quant.upsample``.

    Returns the number of upsamplings lowered.
    """
    return lower(gm, F.interpolate, _upsample_rule, clamps=False)


def _upsample_rule(gm: GraphModule, node: Node) -> Lowered:
    if len(node.args) != 5:
        why(node, "antialiased or recomputed scale factors")
        return None
    x, size, factor, mode, align_corners = node.args
    codes = dequantized(x)
    if codes is None or "shape" not in codes.meta:
        why(node, "its input is not quantized")
        return None
    spatial = len(codes.meta["shape"]) - 2
    if isinstance(size, Node):
        if is_size_tuple(size):
            size = [gm.graph.call_function(operator.getitem, (size, i)) for i in range(spatial)]
        elif not computes_a_size(size):
            why(node, "its size is computed in a way that is not known")
            return None
    return "upsample", {
        "x": codes,
        "size": [size] * spatial if isinstance(size, (int, Node)) else size,
        "scale_factor": [float(factor)] * spatial if isinstance(factor, (int, float)) else factor,
        "mode": mode,
        "align_corners": align_corners,
        **scale_and_zp("x", codes),
    }
