"""Layer and group normalization on codes."""

from __future__ import annotations

import torch

from x86quant.errors import InvalidInputError
from x86quant.ops._numerics import centred, check_codes, check_qparams, codes
from x86quant.ops._register import CLAMP, LUT, OUT_QPARAMS, X_QPARAMS, register


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


@register(
    f"Tensor x, int groups, Tensor? weight, Tensor? bias, float eps, {X_QPARAMS}, {OUT_QPARAMS}, "
    f"{CLAMP}, {LUT}"
)
def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    x_scale: float,
    x_zp: int,
    out_scale: float,
    out_zp: int,
    lo: int = 0,
    hi: int = 255,
    lut: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize the reals of each group of channels of an image, then scale and shift channels."""
    check_codes("group_norm", x=x)
    check_qparams("group_norm", x_scale, x_zp)
    check_qparams("group_norm", out_scale, out_zp)
    if x.dim() < 3 or groups < 1 or x.shape[1] % groups:
        raise InvalidInputError(
            f"x86quant::group_norm: {groups} groups do not divide the channels of a batch, got "
            f"shape {tuple(x.shape)}"
        )
    flat = x.flatten(1).double()
    grouped = flat.reshape(len(flat), groups, flat.shape[1] // groups)
    mean = grouped.mean(2, keepdim=True)
    variance = (grouped - mean).square().mean(2, keepdim=True)
    rstd = torch.rsqrt(variance + eps / x_scale**2)
    normal = ((grouped - mean) * rstd).reshape(x.shape)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if weight is not None:
        normal = normal * weight.reshape(shape)
    if bias is not None:
        normal = normal + bias.reshape(shape)
    return codes(normal.float() * (1.0 / out_scale), out_zp, lo, hi, lut)
