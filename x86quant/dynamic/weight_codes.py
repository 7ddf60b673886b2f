"""The codes and scales of a float weight, whatever its bits."""

from __future__ import annotations

import torch

from x86quant.dynamic.group_weights import group_of, quantize_groups
from x86quant.dynamic.torchao_weights import codes_of_torchao, is_torchao
from x86quant.errors import InvalidInputError

_WEIGHT_MAX = 127


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [N, K] as int8 codes in -127..127 and one float32 scale a row.

    Of a weight that torchao has quantized so these are its own codes and scales.
    """
    if (known := codes_of_torchao(weight)) is not None:
        return known
    if weight.dtype != torch.float32:
        raise InvalidInputError(
            f"the weight of shape {tuple(weight.shape)} is {weight.dtype}, expected float32; "
            "call model.float() first"
        )
    real = weight.detach()
    if not bool(torch.isfinite(real).all()):
        raise InvalidInputError(
            f"the weight of shape {tuple(weight.shape)} holds NaN or infinity; "
            "check the float model"
        )
    largest = real.abs().amax(1) if real.shape[1] else real.new_zeros(real.shape[0])
    scale = (largest / _WEIGHT_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.round(real / scale[:, None]).clamp(-_WEIGHT_MAX, _WEIGHT_MAX)
    # In its own order, whatever that of the float weight: kernels read it row by row.
    return codes.to(torch.int8).contiguous(), scale


def quantized(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [N, K] as codes of ``bits`` and their scales: of groups, where it has 4."""
    group = None if bits == 8 or is_torchao(weight) else group_of(weight.shape[1])
    return quantize_weight(weight) if group is None else quantize_groups(weight, bits, group)
