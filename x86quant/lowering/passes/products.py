"""Convolutions and linears of quantized operands, and what scales an int8 weight by channels."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    dequantized,
    emit,
    finish,
    is_op,
    replace,
    scale_and_zp,
    why,
)
from x86quant.lowering.passes._epilogue import Lowered, lower


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
    codes: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and positive scales that stand for the weight times ``factors``, by output channel.

    A negative factor flips the codes' sign; None when that would overflow (a code of -128).
    """
    negative = (factors < 0).reshape([-1] + [1] * (codes.dim() - 1))
    if bool((negative & (codes == -128)).any()):
        return None
    return torch.where(negative, -codes, codes), scales * factors.abs()


_CONVOLUTION_NAMES = (
    "stride", "padding", "dilation", "transposed", "output_padding", "groups",
)  # fmt: skip


def lower_convolution(gm: GraphModule) -> int:
    """``dequantize -> convolution -> [clamp] -> quantize`` becomes ``x86quant.conv``.

    Returns the number of convolutions lowered.
    """
    return lower(gm, torch.ops.aten.convolution.default, convolution_rule)


def convolution_rule(gm: GraphModule, node: Node) -> Lowered:
    """The convolution of ours that computes what ``node`` does, if its operands are quantized."""
    settings: dict[str, Any] = dict(zip(_CONVOLUTION_NAMES, node.args[3:], strict=True))
    operands = quantized_operands(gm, node, settings["groups"] if settings["transposed"] else 1)
    if operands is None:
        return None
    shape = node.meta.get("shape")
    if shape is not None and len(shape) != len(settings["stride"]) + 2:
        why(node, "its input has no batch dimension")
        return None
    return "conv", {**operands, **settings}


def lower_linear(gm: GraphModule) -> int:
    """``dequantize -> linear -> [clamp] -> quantize`` becomes ``x86quant.linear``.

    Returns the number of linears lowered.
    """
    return lower(gm, torch.ops.aten.linear.default, linear_rule)


def linear_rule(gm: GraphModule, node: Node) -> Lowered:
    """The linear of ours that computes what ``node`` does, if its operands are quantized."""
    operands = quantized_operands(gm, node, 1)
    return None if operands is None else ("linear", operands)


_DECOMPOSED = "quantized_decomposed."


def lower_dynamic_linear(gm: GraphModule) -> int:
    """A linear whose input PT2E quantizes by its range at run time becomes ``linear_dynamic``.

    That quantizes each row by itself, which is never coarser than one range for all of them.

    Returns the number of linears lowered.
    """
    changed = 0
    for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)):
        x, weight, bias = (*node.args, None)[:3]
        real = _quantized_at_run_time(x)
        if real is None:
            continue
        if not isinstance(weight, Node) or not is_op(weight, "dequantize_weight"):
            why(node, "its weight is not a constant int8 weight")
            continue
        if bias is not None and constant(gm, bias) is None:
            why(node, "its bias is not a constant")
            continue
        with gm.graph.inserting_before(node):
            new = emit(
                gm.graph,
                "linear_dynamic",
                node,
                x=real,
                weight=weight.kwargs["weight"],
                weight_scale=scales_of(gm, weight, 1),
                bias=bias,
            )
        replace(node, new)
        changed += 1
    return finish(gm, changed)


def _quantized_at_run_time(x: object) -> Node | None:
    """The float value behind ``x``, if its scale and zero point are computed from it."""
    if not _quantizer_calls(x, "dequantize_per_tensor.tensor"):
        return None
    assert isinstance(x, Node)
    codes = x.args[0]
    if not _quantizer_calls(codes, "quantize_per_tensor.tensor"):
        return None
    assert isinstance(codes, Node)
    found = codes.args[0]
    return found if isinstance(found, Node) and codes.args[1:3] == x.args[1:3] else None


def _quantizer_calls(node: object, name: str) -> bool:
    # Its ops are there only when torchao is imported.
    return isinstance(node, Node) and str(node.target) == _DECOMPOSED + name
