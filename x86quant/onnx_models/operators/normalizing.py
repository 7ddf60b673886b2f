"""Normalization."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.onnx_models.operator_table import operator


def of_channels(values: Any, x: Any) -> Any:
    """``values``, one for each channel of ``x``, as they are broadcast over it."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def _of_places(a: Any, inputs: Any, outputs: Any) -> str | None:
    return None if a.get("spatial", 1) else "statistics of single places (spatial = 0)"


@operator("BatchNormalization", returns_tuple=True, oldest=7, lacks=_of_places)
def batch_norm(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    var: Any,
    *,
    epsilon: float,
    momentum: float,
    training_mode: int = 0,
    spatial: int = 1,
    outputs: int,
) -> Any:
    """By the running statistics, or in training by the batch's own."""
    if not training_mode:
        found = (x - of_channels(mean, x)) / torch.sqrt(of_channels(var, x) + epsilon)
        return ((found * of_channels(scale, x) + of_channels(bias, x)).to(x.dtype),)
    dims = [n for n in range(x.dim()) if n != 1]
    own = torch.mean(x, dims)
    spread = torch.var(x, dims, unbiased=False)
    found = (x - of_channels(own, x)) / torch.sqrt(of_channels(spread, x) + epsilon)
    found = (found * of_channels(scale, x) + of_channels(bias, x)).to(x.dtype)
    kept = (mean * momentum + own * (1 - momentum), var * momentum + spread * (1 - momentum))
    return (found, *kept)[:outputs]


@operator("InstanceNormalization", oldest=6)
def instance_norm(x: Any, scale: Any, bias: Any, *, epsilon: float) -> Any:
    """Each channel of each sample by its own statistics."""
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@operator("GroupNormalization")
def group_norm(
    x: Any,
    scale: Any,
    bias: Any,
    *,
    epsilon: float,
    num_groups: int,
    stash_type: int = 1,
    version: int,
) -> Any:
    """Groups of channels by their own statistics; scales were of groups before version 21."""
    if version < 21:
        times = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(times), bias.repeat_interleave(times)
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("LayerNormalization", returns_tuple=True)
def layer_norm(
    x: Any,
    scale: Any,
    bias: Any = None,
    *,
    axis: int,
    epsilon: float,
    stash_type: int = 1,
    outputs: int,
) -> Any:
    """The dimensions from ``axis`` on by their own statistics."""
    if outputs == 1 and scale.dim() == x.dim() - (axis + x.dim() if axis < 0 else axis):
        return (F.layer_norm(x, scale.shape, scale, bias, epsilon),)
    dims = list(range(axis + x.dim() if axis < 0 else axis, x.dim()))
    wide = x.to(torch.float32)
    mean = torch.mean(wide, dims, keepdim=True)
    inverse = torch.rsqrt(torch.mean((wide - mean) ** 2, dims, keepdim=True) + epsilon)
    found = ((wide - mean) * inverse).to(x.dtype) * scale
    return (found if bias is None else found + bias, mean, inverse)[:outputs]


@operator("SkipLayerNormalization", domain="com.microsoft", returns_tuple=True)
def skip_layer_norm(
    x: Any,
    skip: Any,
    scale: Any,
    beta: Any = None,
    bias: Any = None,
    *,
    epsilon: float = 1e-12,
    outputs: int,
) -> Any:
    """The norm of a sum, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    found = F.layer_norm(total, scale.shape, scale, beta, epsilon)
    return (found, None, None, total)[:outputs]


@operator("SimplifiedLayerNormalization")
@operator("RMSNormalization")
def rms_norm(x: Any, scale: Any, *, axis: int, epsilon: float = 1e-5, stash_type: int = 1) -> Any:
    """The dimensions from ``axis`` on by the root of the mean of their squares."""
    dims = list(range(axis + x.dim() if axis < 0 else axis, x.dim()))
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(torch.mean(wide * wide, dims, keepdim=True) + epsilon)
    return wide.to(x.dtype) * scale


@operator("LRN")
def local_response_norm(x: Any, *, alpha: float, beta: float, bias: float, size: int) -> Any:
    """Each value by the squares of its neighbours in channels."""
    before = (size - 1) // 2
    squares = (x * x).transpose(1, -1)
    squares = F.pad(squares, [before, size - 1 - before])
    total = squares.unfold(-1, size, 1).sum(-1).transpose(1, -1)
    return x / (bias + alpha / size * total) ** beta


@operator("LpNormalization")
def lp_norm(x: Any, *, axis: int, p: int) -> Any:
    """By the norm along ``axis``; zeros stay."""
    norm = (
        torch.sum(torch.abs(x), axis, keepdim=True)
        if p == 1
        else torch.sqrt(torch.sum(x * x, axis, keepdim=True))
    )
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@operator("MeanVarianceNormalization", oldest=9)
def mean_variance_norm(x: Any, *, axes: Any) -> Any:
    """Of mean zero and variance one along ``axes``."""
    dims = list(axes)
    mean = torch.mean(x, dims, keepdim=True)
    spread = torch.mean(x * x, dims, keepdim=True) - mean * mean
    return (x - mean) / (torch.sqrt(spread) + 1e-9)
