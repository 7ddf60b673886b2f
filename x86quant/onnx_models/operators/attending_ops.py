"""Attention, and embeddings of positions."""

from __future__ import annotations

import math
from typing import Any

import torch

from x86quant.onnx_models.operator_table import operator


def _heads(x: Any, number: int | None) -> Any:
    """N×heads×tokens×features, of that or of N×tokens×(heads·features)."""
    if x.dim() == 4:
        return x
    return x.reshape(x.shape[0], x.shape[1], number, -1).transpose(1, 2)


def _attention_lacks(a: Any, inputs: Any, outputs: Any) -> str | None:
    if len(outputs) > 3:
        return "its fourth result, the scores"
    if len(inputs) > 6:
        return "lengths of samples"
    return "softcap" if a["softcap"] else None


@operator("Attention", returns_tuple=True, lacks=_attention_lacks)
def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    *,
    is_causal: int,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int,
    scale: float | None = None,
    softcap: float,
    softmax_precision: int | None = None,
    outputs: int,
) -> Any:
    """Scaled dot products of queries and keys, their softmax, times values."""
    flat = q.dim() == 3
    q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    if past_key is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = (k, v)
    groups = q.shape[1] // k.shape[1]
    if groups != 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q, k.transpose(-1, -2)) * factor
    if is_causal:
        past = 0 if past_key is None else past_key.shape[2]
        rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
        allowed = columns[None, :] <= rows[:, None] + past
        scores = torch.where(allowed, scores, -math.inf)
    if mask is not None:
        missing = k.shape[2] - mask.shape[-1]
        if mask.dtype is torch.bool:
            mask = torch.nn.functional.pad(mask.to(torch.uint8), (0, missing)).to(torch.bool)
            scores = torch.where(mask, scores, -math.inf)
        else:
            scores = scores + torch.nn.functional.pad(mask, (0, missing), value=-math.inf)
    shares = torch.softmax(scores, -1)
    shares = torch.where(torch.isnan(shares), torch.zeros_like(shares), shares)
    found = torch.matmul(shares.to(v.dtype), v)
    if flat:
        found = found.transpose(1, 2).flatten(2)
    return (found, *present)[:outputs]


@operator("RotaryEmbedding")
def rotary_embedding(
    x: Any,
    cosines: Any,
    sines: Any,
    positions: Any = None,
    *,
    interleaved: int,
    num_heads: int = 0,
    rotary_embedding_dim: int,
) -> Any:
    """Pairs of features turned by their position."""
    flat = x.dim() == 3
    if flat:
        x = _heads(x, num_heads)
    if positions is not None:
        cosines, sines = cosines[positions], sines[positions]
    size = rotary_embedding_dim or x.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    cosines, sines = cosines[..., : size // 2].unsqueeze(1), sines[..., : size // 2].unsqueeze(1)
    if interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part[..., : size // 2], part[..., size // 2 :]
    real, imaginary = first * cosines - second * sines, first * sines + second * cosines
    if interleaved:
        turned = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        turned = torch.cat([real, imaginary], -1)
    found = torch.cat([turned, rest], -1)
    return found.transpose(1, 2).flatten(2) if flat else found
