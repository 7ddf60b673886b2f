"""Graphs that compute each row, along the last dimension, by itself: such rows may stand in tensors
of any rank, as they may for ``nn.Linear``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import constant, is_op

_POINTWISE = ("quantize", "dequantize", "requantize", "lut", "add", "mul")
_ALONG_AN_AXIS = ("layer_norm", "affine")
_PRODUCTS = ("linear", "linear_real", "linear_dynamic", "linear_weight_only")
_FUNCTIONS: frozenset[Any] = frozenset(
    {F.relu, F.gelu, F.silu, torch.relu, torch.sigmoid, torch.tanh}
    | {torch.ops.aten.mul.Tensor, torch.ops.aten.clamp.default}
)
_LAYERS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout)


def row_rank(graph_module: GraphModule) -> int | None:
    """The rank of the one input, if every row in it is computed by itself; else None."""
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    rank = len(inputs[0].meta.get("shape", ())) if len(inputs) == 1 else 0
    if rank < 2 or inputs[0].args:
        return None
    rowwise = all(_is_rowwise(node, graph_module, rank) for node in graph_module.graph.nodes)
    return rank if rowwise else None


def _is_rowwise(node: Node, graph_module: GraphModule, rank: int) -> bool:
    if node.op == "output":
        results = node.args[0] if isinstance(node.args[0], tuple) else (node.args[0],)
        return all(isinstance(x, Node) and x.op.startswith("call") for x in results)
    if node.op == "call_module":
        return type(graph_module.get_submodule(str(node.target))) in _LAYERS
    if node.op in ("placeholder", "get_attr"):
        return True  # constants are looked at where they are used
    if is_op(node, *_ALONG_AN_AXIS):
        return node.kwargs["axis"] in (rank - 1, -1)
    if is_op(node, *_PRODUCTS):
        return True
    constants = (constant(graph_module, x) for x in node.all_input_nodes)
    return (is_op(node, *_POINTWISE) or node.target in _FUNCTIONS) and all(
        x is None or x.dim() <= 1 for x in constants
    )


def as_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """The rows of ``x`` in a tensor of ``rank`` dimensions."""
    return x.reshape(*[1] * (rank - 2), x.shape[:-1].numel(), x.shape[-1])


def as_in(x: torch.Tensor, result: Any) -> Any:
    """``result``, rows for those of ``x``, as they stand in ``x``."""
    if isinstance(result, tuple):
        return tuple(as_in(x, one) for one in result)
    return result.reshape(*x.shape[:-1], result.shape[-1])
