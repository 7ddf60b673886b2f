"""How layers of convolutions and linears are emitted, whoever made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Node

from x86quant.lowering.builder import Builder
from x86quant.lowering.rounded import (
    Int8Weight,
)

aten = torch.ops.aten


ModuleConverter = Callable[..., Any]


FunctionConverter = Callable[..., Any]


def _margins(module: Any, dims: int) -> list[tuple[int, int]]:
    """Padding before and after each dimension."""
    if not isinstance(module.padding, str):
        return [(p, p) for p in module.padding]
    if module.padding == "valid":
        return [(0, 0)] * dims
    totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [(total // 2, total - total // 2) for total in totals]


def convolution(
    builder: Builder, path: str, module: Any, x: Any, weight: torch.Tensor | Int8Weight, bias: Any
) -> Any:
    """Emit the convolution ``module`` with ``weight`` and ``bias``."""
    codes = weight.codes if isinstance(weight, Int8Weight) else weight
    dims = codes.dim() - 2
    transposed = bool(getattr(module, "transposed", False))
    margins = _margins(module, dims)
    padding = [before for before, _ in margins]
    if module.padding_mode != "zeros" or any(before != after for before, after in margins):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        # F.pad starts with the last dimension.
        sides = [side for margin in reversed(margins) for side in margin]
        x = builder.same_codes(x, builder.call(F.pad, x, sides, mode), margins)
        padding = [0] * dims
    return builder.call(
        aten.convolution.default,
        x,
        builder.weight(path, weight, transposed_groups=module.groups if transposed else 0),
        None if bias is None else builder.constant(f"{path}_bias", bias),
        list(module.stride),
        padding,
        list(module.dilation),
        transposed,
        list(module.output_padding) if transposed else [0] * dims,
        module.groups,
    )


def linear(
    builder: Builder,
    path: str,
    x: Any,
    weight: torch.Tensor | Int8Weight,
    bias: torch.Tensor | None,
) -> Any:
    """Emit a linear layer."""
    constant = None if bias is None else builder.constant(f"{path}_bias", bias)
    return builder.call(F.linear, x, builder.weight(path, weight), constant)


def optional(builder: Builder, hint: str, tensor: torch.Tensor | None) -> Node | None:
    """A constant, in float, or None."""
    if tensor is None:
        return None
    return builder.constant(hint, tensor.dequantize() if tensor.is_quantized else tensor)
