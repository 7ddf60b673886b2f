"""Layer norms and RMS norms over the last dimension become ``norm_rows``."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish
from x86quant.lowering.row_passes._values import (
    argument,
    emit_many,
    is_float32,
    same_sizes,
    sizes,
    value_of,
)
from x86quant.ops.rows import NORMED

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of norms recognised."""
    changed = 0
    for node in list(gm.graph.nodes):
        found = None if node._erased or node.op != "call_function" else _norm(node)
        if found is None:
            continue
        value = value_of(node)
        with gm.graph.inserting_before(node):
            _, _, normed, *_ = emit_many(
                gm.graph, "norm_rows", node, (None, value), residual=None, outputs=NORMED, **found
            )
        total = normed.args[0]
        node.replace_all_uses_with(normed)
        gm.graph.erase_node(node)
        for user in list(total.users):  # type: ignore[union-attr]
            if not user.users:
                gm.graph.erase_node(user)
        changed += 1
    return finish(gm, changed)


def _norm(node: Node) -> dict[str, Any] | None:
    """The arguments of ``norm_rows`` that gives what ``node`` does."""
    if node.target is aten.layer_norm.default:
        return _of_op(node, "layer")
    if node.target is aten.rms_norm.default:
        return _of_op(node, "rms")
    return _spelled_rms(node)


def _of_op(node: Node, kind: str) -> dict[str, Any] | None:
    x, shape = node.args[0], node.args[1]
    weight = argument(node, 2, "weight")
    bias = argument(node, 3, "bias") if kind == "layer" else None
    eps = argument(node, 4, "eps", 1e-5) if kind == "layer" else argument(node, 3, "eps")
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    found = {"x": x, "norm_weight": weight, "norm_bias": bias, "eps": eps, "kind": kind}
    fits = isinstance(shape, list | tuple) and len(shape) == 1 and type(shape[0]) is int
    return found if fits and _is_rows(x, weight, bias) else None


def _is_rows(x: object, weight: object, bias: object) -> bool:
    """Whether all are float32, and weight and bias constants, one number a feature of ``x``."""
    whole = sizes(x)
    if not whole or not is_float32(x):
        return False
    return all(
        w is None
        or (isinstance(w, Node) and w.op == "get_attr" and is_float32(w) and sizes(w) == whole[-1:])
        for w in (weight, bias)
    )


def _spelled_rms(node: Node) -> dict[str, Any] | None:
    """``weight * (x * rsqrt(mean(x ** 2, -1) + eps))``, as transformers write it."""
    if node.target is not aten.mul.Tensor:
        return None
    for weight, normed in (node.args[:2], node.args[1::-1]):
        if not isinstance(weight, Node) or weight.op != "get_attr" or not isinstance(normed, Node):
            continue
        found = _without_weight(normed)
        if found is None or len(normed.users) != 1 or not same_sizes(node, normed):
            continue
        x, eps = found
        if _is_rows(x, weight, None) and is_float32(node):
            return {
                "x": x, "norm_weight": weight, "norm_bias": None, "eps": eps, "kind": "rms"
            }  # fmt: skip
    return None


def _without_weight(node: Node) -> tuple[Node, float] | None:
    """What ``x * rsqrt(mean(x ** 2, -1) + eps)`` norms, and its eps."""
    if node.target is not aten.mul.Tensor:
        return None
    for x, inverse in (node.args[:2], node.args[1::-1]):
        if not isinstance(inverse, Node) or inverse.target is not aten.rsqrt.default:
            continue
        mean_plus = inverse.args[0]
        if not isinstance(mean_plus, Node) or mean_plus.target is not aten.add.Tensor:
            continue
        mean, eps = mean_plus.args[:2]
        if not isinstance(mean, Node) or not isinstance(eps, float) or mean_plus.kwargs:
            continue
        if mean.target is not aten.mean.dim or argument(mean, 3, "dtype") is not None:
            continue
        square, dims, keep = mean.args[0], mean.args[1], argument(mean, 2, "keepdim", False)
        if not isinstance(square, Node) or not isinstance(x, Node) or keep is not True:
            continue
        rank = len(sizes(square) or ())
        if list(dims) not in ([-1], [rank - 1]):  # type: ignore[arg-type]
            continue
        if _squares(square) is x and is_float32(x):
            return x, eps
    return None


def _squares(node: Node) -> object:
    """What ``node`` squares."""
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return node.args[0]
    if node.target is aten.square.default:
        return node.args[0]
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        return node.args[0]
    return None
