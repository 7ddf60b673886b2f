"""Maxima over whole dimensions, in all their spellings, as ``torch.amax``: it has an int8 form."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import given_by_name

aten = torch.ops.aten
_ADAPTIVE = {
    nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3,
    F.adaptive_max_pool1d: 1, F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3,
}  # fmt: skip
_POOLS = {F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3}


def spell_maxima(gm: GraphModule) -> None:
    """Let maxima of ``gm`` over whole dimensions be calls of ``torch.amax``; not yet recompiled."""
    modules = dict(gm.named_modules(remove_duplicate=False))
    for node in list(gm.graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        found = _over_dimensions(node) or _to_one_position(node, module)
        if found is None:
            continue
        dims, keepdim = found
        node.op, node.target = "call_function", torch.amax
        node.args, node.kwargs = (node.args[0], dims, keepdim), {}
    gm.graph.eliminate_dead_code()


def _over_dimensions(node: Node) -> tuple[list[int], bool] | None:
    """``x.amax(...)``, and ``x.max(dim)`` of which only the values are read."""
    given: Any = given_by_name(node, ("input", "dim", "keepdim"))
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    if not isinstance(keepdim, bool) or given.keys() - {"input", "dim", "keepdim"} or not node.args:
        return None
    if node.target in (torch.amax, aten.amax.default) or _calls(node, "amax"):
        dims = [dim] if isinstance(dim, int) else dim
        known = isinstance(dims, list | tuple) and dims and all(isinstance(x, int) for x in dims)
        return (list(dims), keepdim) if known else None
    if node.target not in (torch.max, aten.max.dim) and not _calls(node, "max"):
        return None
    if not isinstance(dim, int) or not all(map(_is_of_values, node.users)):
        return None
    for user in list(node.users):
        user.replace_all_uses_with(node)
        node.graph.erase_node(user)
    return [dim], keepdim


def _calls(node: Node, method: str) -> bool:
    return node.op == "call_method" and node.target == method


def _is_of_values(node: Node) -> bool:
    """Whether ``node`` takes the first of a pair of values and indices."""
    if node.target is operator.getitem:
        return bool(node.args[1] == 0)
    return node.target is getattr and node.args[1] == "values"


def _to_one_position(node: Node, module: nn.Module | None) -> tuple[list[int], bool] | None:
    """A pool whose one window is everything, whatever its size."""
    names = ("input", "size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    given: Any = given_by_name(node, names)
    if type(module) in _ADAPTIVE:
        given["size"] = module.output_size  # type: ignore[union-attr]
        given["return_indices"] = module.return_indices  # type: ignore[union-attr]
    kind: Any = type(module) if module is not None else node.target
    size = given.get("size", given.get("output_size", given.get("kernel_size")))
    padded = given.get("padding") not in (None, 0, [0], (0,), [0, 0], [0, 0, 0])
    if not node.args or padded or given.get("return_indices"):
        return None
    if kind in _ADAPTIVE:
        rank, whole = _ADAPTIVE[kind], size in (1, [1], (1,), (1, 1), [1, 1], (1, 1, 1), [1, 1, 1])
    elif kind in _POOLS:
        rank = _POOLS[kind]
        whole = _are_sizes(size, node.args[0], rank)
    else:
        return None
    return (list(range(-rank, 0)), True) if whole else None


def _are_sizes(sizes: Any, x: Any, rank: int) -> bool:
    """Whether ``sizes`` are the last ``rank`` ones of ``x``, whose first two are others."""
    elementwise = isinstance(x, Node) and (x.target is F.relu or _calls(x, "relu"))
    if elementwise and x.args and _are_sizes(sizes, x.args[0], rank):
        return True
    if isinstance(sizes, Node):
        if sizes.target is operator.getitem and _is_shape(sizes.args[0], x):
            return sizes.args[1] in (slice(2, None), slice(-rank, None)) or (
                rank == 1 and sizes.args[1] in (2, -1)
            )
        return rank == 1 and _is_size(sizes, x, (2, -1))
    if not isinstance(sizes, list | tuple) or len(sizes) != rank:
        return False
    return all(_is_size(size, x, (2 + i, i - rank)) for i, size in enumerate(sizes))


def _is_size(size: Any, x: Any, dims: tuple[int, int]) -> bool:
    if not isinstance(size, Node):
        return False
    if size.target is operator.getitem:
        return size.args[1] in dims and _is_shape(size.args[0], x)
    dim = size.args[1] if len(size.args) > 1 else size.kwargs.get("dim")
    return _calls(size, "size") and size.args[0] is x and dim in dims


def _is_shape(shape: Any, x: Any) -> bool:
    if not isinstance(shape, Node) or x not in shape.args[:1]:
        return False
    return (shape.target is getattr and shape.args[1] == "shape") or (
        _calls(shape, "size") and len(shape.args) == 1 and not shape.kwargs
    )
