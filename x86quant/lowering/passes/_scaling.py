"""Per-channel scaling of an int8 weight, and batch norm as scale and shift."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import constant


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
