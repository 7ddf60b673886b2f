"""Linears that torchao has quantized and that do more to an input than choose its range by rows.

Their codes and scales become a linear of ours as any weight's do. What torchao does before the
product stands in front of it, in a graph that runs natively: features are scaled (SmoothQuant,
AWQ), and an input is quantized by a range that was chosen beforehand (static int8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.compiled import CompiledModule
from x86quant.dynamic.layers import Int8Linear, WeightOnlyLinear, carry_attributes
from x86quant.dynamic.torchao_weights import is_torchao, refusal, stored_codes
from x86quant.lowering.builder import Builder
from x86quant.lowering.graph_tools import emit

#: Codes of int8, and those of a range that is made half as wide where there is no VNNI.
_RANGES = {False: (-128, 127), True: (-64, 63)}
#: What a signed code lacks to the unsigned one of ours.
_TO_UNSIGNED = 128


@dataclass(frozen=True)
class _StaticRange:
    """By which an input is quantized: real = scale * (code - zero_point), from low to high."""

    scale: float
    zero_point: int
    low: int
    high: int


def from_torchao(linear: nn.Module, kind: type[Int8Linear]) -> nn.Module:
    """``linear``, whose weight is torchao's, as a ``kind``, or as a graph around its product.

    Raises:
        UnsupportedError: torchao treats the input in a way that has no form here.
    """
    weight = linear.get_parameter("weight")
    product = kind.from_float(linear, operands=stored_codes(weight))
    before = getattr(weight, "act_pre_scale", None)
    static = None if kind is WeightOnlyLinear else _static_range(weight)
    found: nn.Module = product
    if before is not None or static is not None:
        found = _graph(product, before, static)
        carry_attributes(linear, found)
    # Of float32 they are made; to say so again would convert scales of 16 bits.
    return found if weight.dtype is torch.float32 else found.to(weight.dtype)


def takes_codes_of(linear: nn.Module) -> bool:
    """Whether the weight of ``linear`` is torchao's."""
    weight = linear._parameters.get("weight")
    return weight is not None and is_torchao(weight)


def _static_range(weight: torch.Tensor) -> _StaticRange | None:
    scale = getattr(weight, "act_quant_scale", None)
    if scale is None:
        return None
    if scale.numel() != 1:
        raise refusal(
            weight,
            f"which quantizes inputs by {scale.numel()} scales that were chosen beforehand, one "
            "for each of so many rows (take granularity=PerTensor() for the inputs)",
        )
    zero_point = getattr(weight, "act_quant_zero_point", None)
    low, high = _RANGES[bool(getattr(weight, "reduce_range", False))]
    return _StaticRange(float(scale), 0 if zero_point is None else int(zero_point), low, high)


def _graph(
    product: Int8Linear, before: torch.Tensor | None, static: _StaticRange | None
) -> CompiledModule:
    builder = Builder()
    x: Node = builder.graph.placeholder("x")
    x.meta.update(shape=(1, product.in_features), input_dtype=torch.float32)
    operands = {
        "weight": builder.constant("weight", product.int8_weight),
        "weight_scale": builder.constant("weight_scale", product.weight_scale),
        "bias": None if product.bias is None else builder.constant("bias", product.bias),
    }
    if before is not None:
        factors = before.to(torch.float32).flatten()
        x = builder.call(torch.mul, x, builder.constant("factors", factors))
    if static is None:
        out = emit(builder.graph, product.op, x=x, **operands)
    else:
        if (static.low, static.high) != _RANGES[False]:
            ends = [(end - static.zero_point) * static.scale for end in (static.low, static.high)]
            x = builder.call(torch.clamp, x, *ends)
        scale, zero_point = static.scale, static.zero_point + _TO_UNSIGNED
        codes = emit(builder.graph, "quantize", x=x, out_scale=scale, out_zp=zero_point)
        out = emit(
            builder.graph, "linear_real", x=codes, x_scale=scale, x_zp=zero_point, **operands
        )
    builder.graph.output(out)
    return CompiledModule(GraphModule(builder.root, builder.graph))
