"""Batch norm, and a sum or product with a constant vector, become ``x86quant.affine``."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    dequantized,
    scale_and_zp,
    why,
)
from x86quant.lowering.passes._epilogue import Lowered, lower
from x86quant.lowering.passes._weights import batch_norm_affine

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of ops lowered."""
    changed = lower(gm, aten.batch_norm.default, _batch_norm)
    for target in (aten.mul.Tensor, aten.add.Tensor):
        changed += lower(gm, target, _constant_operand)
    return changed


def _batch_norm(gm: GraphModule, node: Node) -> Lowered:
    codes = dequantized(node.args[0])
    if codes is None:
        why(node, "its input is not quantized")
        return None
    affine = batch_norm_affine(gm, node)
    if affine is None:
        why(node, "it has no running statistics")
        return None
    return _affine(gm, node, codes, *affine, axis=1)


def _constant_operand(gm: GraphModule, node: Node) -> Lowered:
    """``x * c`` or ``x + c`` where c varies along one dimension of x at most."""
    for x, other in (node.args[:2], node.args[1::-1]):
        codes, vector = dequantized(x), constant(gm, other)
        if codes is None or vector is None or "shape" not in codes.meta:
            continue
        axis = _axis(tuple(vector.shape), codes.meta["shape"])
        if axis is None:
            why(node, f"a constant of shape {tuple(vector.shape)} is not a vector along one axis")
            return None
        # One element stands for all: the sizes of the example are not those of every call.
        flat = vector.reshape(-1).float()
        if node.target is aten.mul.Tensor:
            return _affine(gm, node, codes, flat, torch.zeros_like(flat), axis=axis)
        return _affine(gm, node, codes, torch.ones_like(flat), flat, axis=axis)
    return None


def _axis(constant_shape: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """The one dimension of ``shape`` along which the broadcast constant varies (else 1)."""
    if len(constant_shape) > len(shape):
        return None
    offset = len(shape) - len(constant_shape)
    varying = [offset + i for i, size in enumerate(constant_shape) if size != 1]
    if not varying:
        return 1 if len(shape) > 1 else 0
    same = len(varying) == 1 and constant_shape[varying[0] - offset] == shape[varying[0]]
    return varying[0] if same else None


def _affine(
    gm: GraphModule, node: Node, codes: Node, scale: torch.Tensor, shift: torch.Tensor, axis: int
) -> Lowered:
    return "affine", {
        "x": codes,
        "scale": add_constant(gm, gm.graph, f"{node.name}_scale", scale),
        "shift": add_constant(gm, gm.graph, f"{node.name}_shift", shift),
        "axis": axis,
        **scale_and_zp("x", codes),
    }
