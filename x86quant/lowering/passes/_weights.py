"""The operands that convolution and linear share, and what scales an int8 weight by channels."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    dequantized,
    is_op,
    scale_and_zp,
    why,
)


def quantized_operands(gm: GraphModule, node: Node, repeat: int) -> dict[str, Any] | None:
    """Keyword arguments x, weight, weight_scales, bias of a float ``node(x, weight, bias, ...)``.

    The scales are one a channel of the output: a per-tensor scale is repeated, and the scales of
    a transposed convolution with ``repeat`` groups are one set a group.
    """
    x, weight, bias = (*node.args, None)[:3]
    codes = dequantized(x)
    if codes is None:
        why(node, "its input is not quantized")
        return None
    if not is_op(weight, "dequantize_weight"):
        reason = weight.meta.get("why") if isinstance(weight, Node) else None
        why(node, reason or "its weight is not a constant int8 weight")
        return None
    assert isinstance(weight, Node)
    if bias is not None and constant(gm, bias) is None:
        why(node, "its bias is not a constant")
        return None
    return {
        "x": codes,
        "weight": weight.kwargs["weight"],
        "weight_scales": scales_of(gm, weight, repeat),
        "bias": bias,
        **scale_and_zp("x", codes),
    }


def scales_of(gm: GraphModule, weight: Node, repeat: int) -> Node:
    """The scales of a ``dequantize_weight`` node, one a channel of the output."""
    node = weight.kwargs["weight_scales"]
    scales, codes = constant(gm, node), constant(gm, weight.kwargs["weight"])
    assert isinstance(node, Node)
    assert scales is not None
    assert codes is not None
    axis = weight.kwargs["axis"]
    assert isinstance(axis, int)
    channels = codes.shape[axis] * repeat
    if scales.numel() == channels:
        return node
    full = scales.expand(channels) if scales.numel() == 1 else scales.repeat(repeat)
    return add_constant(gm, gm.graph, str(node.target), full.contiguous())


def batch_norm_affine(gm: GraphModule, norm: Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``(scale, shift)`` per channel of an ``aten.batch_norm`` node in inference."""
    _, weight, bias, mean, var, training, _, eps, _ = norm.args
    found_mean, found_var = constant(gm, mean), constant(gm, var)
    if training or found_mean is None or found_var is None:
        return None
    scale = torch.rsqrt(found_var.double() + float(eps))  # type: ignore[arg-type]
    if (gamma := constant(gm, weight)) is not None:
        scale = scale * gamma.double()
    shift = -found_mean.double() * scale
    if (beta := constant(gm, bias)) is not None:
        shift = shift + beta.double()
    return scale.float(), shift.float()


def scaled_weight(
    codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor, axis: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and positive scales that stand for the weight times ``factors`` along ``axis``.

    A negative factor flips the codes' sign; None when that would overflow (a code of -128).
    """
    shape = [1] * codes.dim()
    shape[axis] = -1
    negative = (factors < 0).reshape(shape)
    if bool((negative & (codes == -128)).any()):
        return None
    return torch.where(negative, -codes, codes), scales * factors.abs()
