"""Linears of vLLM on our kernels: W8A8 and W4A8, whose inputs are quantized row by row.

Codes and scales are those that vLLM loaded. Rows come and go in the model's floating type; within
they are float32, and quantized to unsigned codes whatever sign the checkpoint's recipe has, which
is never coarser. Layers stay plain tensors and an op, so that vLLM can compile around them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from x86quant.ops.groups import GROUP_STEP, MOST_GROUPS, exact_half, pack_nibbles
from x86quant.packing.linear_dynamic import extension_loads

Answer = tuple[bool, str | None]

_BIAS = "x86quant_bias"


def put_first() -> None:
    """Put our kernels in front of vLLM's for the CPU."""
    for known, ours in (
        (kernels._POSSIBLE_INT8_KERNELS, X86QuantInt8LinearKernel),
        (kernels._POSSIBLE_KERNELS, X86QuantInt4LinearKernel),
    ):
        on_cpu = known[PlatformEnum.CPU]
        if ours not in on_cpu:  # plugins may be loaded again
            on_cpu.insert(0, ours)


def _runs_here() -> Answer:
    if not current_platform.is_cpu():
        return False, "requires CPU."
    if not extension_loads():
        return False, "requires x86quant's compiled extension."
    return True, None


class X86QuantInt8LinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """int8 weights with a scale a row, or a part of the rows."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Whether it runs on this machine, and why not."""
        return _runs_here()

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> Answer:
        """Whether it can run such a layer, and why not."""
        if c.is_static_input_scheme:
            return False, "quantizes inputs by the range of each row, not by a given one."
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the codes as they are, and a scale for each of their rows."""
        w_q, w_s = self.layer_param_names[:2]
        codes = getattr(layer, w_q).data.contiguous()
        scale = getattr(layer, w_s).data.to(torch.float32).flatten()
        if scale.numel() != codes.shape[0]:  # one for all of it, or for each of the layers in it
            widths: Any = layer.logical_widths if scale.numel() > 1 else [codes.shape[0]]
            scale = scale.repeat_interleave(torch.tensor(widths, dtype=torch.int64))
        _keep(layer, {w_q: codes, w_s: scale})

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` [..., in] to [..., out], in its own type."""
        w_q, w_s = self.layer_param_names[:2]
        return _product(layer, x, getattr(layer, w_q), getattr(layer, w_s), bias)


class X86QuantInt4LinearKernel(MPLinearKernel):  # type: ignore[misc]
    """Weights of 4 bits with a scale for each group of input features, inputs in int8."""

    @classmethod
    def get_min_capability(cls) -> int:
        """What GPUs would need."""
        return 1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> Answer:
        """Whether it can run such a layer, and why not."""
        runs, reason = _runs_here()
        if not runs:
            return False, reason
        if c.weight_type != scalar_types.int4:  # the others are for inputs that stay in float
            return False, f"Unsupported quant type {c.weight_type}"
        if c.zero_points:
            return False, "takes no zero points"
        features = c.partition_weight_shape[0]
        group = _group(c)
        if group % GROUP_STEP or features % group or features // group > MOST_GROUPS:
            return (
                False,
                f"Group size ({group}) must be a multiple of {GROUP_STEP} that divides "
                f"the number of input features ({features})",
            )
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Put two codes into a byte; a scale stands for each group."""
        codes, scale, _ = self._get_weight_params(layer)
        groups = self.config.partition_weight_shape[0] // _group(self.config)
        real = scale.data.to(torch.float32).reshape(codes.shape[0], groups)
        packed = pack_nibbles(codes.data)
        _keep(layer, {self.w_q_name: packed, self.w_s_name: exact_half(real)})

    def apply_weights(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` [..., in] to [..., out], in its own type."""
        codes, scale, _ = self._get_weight_params(layer)
        return _product(layer, x, codes, scale, bias)


def _group(c: MPLinearLayerConfig) -> int:
    """Features of a group; -1 stands for all of them."""
    return int(c.partition_weight_shape[0] if c.group_size == -1 else c.group_size)


def _keep(layer: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Let ``layer`` hold ``tensors``, and its bias in float32, which packs are made of."""
    for name, tensor in tensors.items():
        if name in layer._parameters:
            del layer._parameters[name]
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
    bias = getattr(layer, "bias", None)
    real = None if bias is None else bias.data.to(torch.float32)
    layer.register_buffer(_BIAS, real, persistent=False)


def _product(
    layer: nn.Module,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    real = getattr(layer, _BIAS) if bias is not None else None
    out: torch.Tensor = torch.ops.x86quant.linear_dynamic(x.float(), weight, scale, real)
    if bias is not None and real is None:  # not the layer's own
        out = out + bias
    return out.to(x.dtype)
