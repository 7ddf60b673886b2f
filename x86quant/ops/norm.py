"""Layer normalization on codes."""

from __future__ import annotations

import torch

from x86quant.ops._numerics import centred, check_codes, check_qparams, codes
from x86quant.ops._register import OUT_QPARAMS, X_QPARAMS, register


@register(
    f"Tensor x, int axis, Tensor? weight, Tensor? bias, float eps, {X_QPARAMS}, {OUT_QPARAMS}"
)
def layer_norm(
    x: torch.Tensor,
    axis: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
) -> torch.Tensor:
    """Normalize the reals along the single dimension ``axis``, then scale and shift them."""
    check_codes("layer_norm", x=x)
    check_qparams("layer_norm", x_scale, x_zp)
    check_qparams("layer_norm", out_scale, out_zp)
    real = centred(x, x_zp) * x_scale
    centre = real - real.mean(axis, keepdim=True)
    normal = centre * torch.rsqrt((centre * centre).mean(axis, keepdim=True) + eps)
    shape = [1] * x.dim()
    shape[axis] = -1
    if weight is not None:
        normal = normal * weight.reshape(shape)
    if bias is not None:
        normal = normal + bias.reshape(shape)
    return codes(normal * (1.0 / out_scale), out_zp)
