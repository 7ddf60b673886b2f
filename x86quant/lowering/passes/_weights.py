"""The operands that convolution and linear share."""

from __future__ import annotations

from typing import Any

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
