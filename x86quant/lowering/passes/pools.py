"""Pools, means and maxima over positions, and interpolation, on codes."""

from __future__ import annotations

import dataclasses
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
        over = _over_positions(node)
        if over is None:
            continue
        with gm.graph.inserting_before(node):
            new = emit(gm.graph, "adaptive_max_pool", node, x=over.codes, output_size=over.sizes)
            new.meta["qparams"] = over.codes.meta["qparams"]
            new.meta["shape"] = over.shape
            real = emit(gm.graph, "dequantize", x=new, **scale_and_zp("x", over.codes))
            if not node.args[2]:
                real.meta["shape"] = over.shape
                real = gm.graph.call_function(torch.squeeze, (real, over.dims))
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
        over = _over_positions(mean)
        if over is None:
            continue
        with gm.graph.inserting_before(quantize):
            new = emit(
                gm.graph,
                "adaptive_avg_pool",
                quantize,
                x=over.codes,
                output_size=over.sizes,
                **scale_and_zp("x", over.codes),
                **scale_and_zp("out", quantize),
            )
            if not mean.args[2]:
                new.meta["shape"] = over.shape
                view = (torch.squeeze, over.dims) if -1 in over.sizes else (torch.flatten, 1)
                new = inherit(gm.graph.call_function(view[0], (new, view[1])), quantize)
        replace(quantize, new)
        changed += 1
    return finish(gm, changed)


@dataclasses.dataclass(frozen=True, slots=True)
class _OverPositions:
    """What makes one position of all along some dimensions.

    Attributes:
        codes: what it reads.
        dims: the dimensions, in order.
    """

    codes: Node
    dims: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """The ``output_size`` of a pool that does so."""
        return [1 if dim in self.dims else -1 for dim in range(2, len(self.codes.meta["shape"]))]

    @property
    def shape(self) -> tuple[Any, ...]:
        """That of the pool's result."""
        sizes = enumerate(self.codes.meta["shape"])
        return tuple(1 if dim in self.dims else size for dim, size in sizes)


def _over_positions(node: Node) -> _OverPositions | None:
    """What ``node``, a mean or a maximum, is over, if that is quantized positions alone."""
    codes = dequantized(node.args[0])
    if codes is None or "shape" not in codes.meta:
        why(node, "its input is not quantized")
        return None
    rank = len(codes.meta["shape"])
    over: Any = node.args[1]
    # The one dimension that torch allows for a number has no rank to be counted by.
    dims = sorted({int(dim) % max(rank, 1) for dim in over})
    if rank not in (3, 4, 5) or not dims or dims[0] < 2:
        why(node, f"what is over dimensions {dims} of {rank} is not over positions alone")
        return None
    return _OverPositions(codes, tuple(dims))


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
