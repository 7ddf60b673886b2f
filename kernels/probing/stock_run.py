"""One quantized op by the stock operators of one engine, without any routing before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from x86quant.spec import OpSpec


def run(
    kernel: str,
    spec: OpSpec,
    x: Tensor,
    weight: Tensor,
    zero_point: int,
    scale: float,
    y_zero_point: int,
) -> Tensor:
    """The codes that ``kernel`` computes of codes ``x`` and int8 ``weight``, both of scale 1."""
    make: Any = torch._make_per_tensor_quantized_tensor
    name = spec.op.replace("conv", "conv_transpose") if spec.transposed else spec.op
    geometry: list[Any] = []
    if spec.op != "linear":
        between = [(0,) * spec.dims] if spec.transposed else []
        geometry = [spec.stride, spec.padding, *between, spec.dilation, spec.groups]
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = kernel
    try:
        prepack = getattr(torch.ops.quantized, f"{name}_prepack")
        packed = prepack(make(weight, 1.0, 0), None, *geometry)
        run_packed = getattr(torch.ops.quantized, name)
        codes: Tensor = run_packed(make(x, 1.0, zero_point), packed, scale, y_zero_point).int_repr()
    finally:
        torch.backends.quantized.engine = before
    return codes
