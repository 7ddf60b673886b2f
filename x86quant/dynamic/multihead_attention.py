"""``DynamicMultiheadAttention``: ``nn.MultiheadAttention`` with its projections in int8."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from x86quant.dynamic.group_weights import quantize_weight
from x86quant.dynamic.layers import (
    DynamicLinear,
    carry_attributes,
    float_bias,
)
from x86quant.errors import InvalidInputError
from x86quant.ops.float_type import Int8Module, in_float32, in_float_type
from x86quant.packing import linear_dynamic as linear_packs


class DynamicMultiheadAttention(Int8Module):
    """``nn.MultiheadAttention`` with both projections in int8, the attention itself in float.

    A drop-in replacement in ``forward``, and in what it answers. The fast paths of
    ``nn.TransformerEncoderLayer`` would compute with the float weights: they leave an attention
    alone whose weights are not plain tensors, and ``to_dynamic`` turns them off.
    """

    # What it would have if it were of the kinds that are refused.
    q_proj_weight: None = None
    k_proj_weight: None = None
    v_proj_weight: None = None
    bias_k: None = None
    bias_v: None = None
    add_zero_attn = False
    _qkv_same_embed_dim = True

    def __init__(
        self,
        in_proj: DynamicLinear,
        out_proj: DynamicLinear,
        num_heads: int,
        batch_first: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_proj = in_proj
        self.out_proj = out_proj
        self.embed_dim = in_proj.in_features
        self.num_heads = num_heads
        self.batch_first = batch_first
        self.dropout = dropout
        self._split: tuple[Any, tuple[DynamicLinear, ...]] | None = None

    @property
    def in_proj_weight(self) -> torch.Tensor:
        """The float weight of the joint input projection; no memory is used until it is read."""
        return self.in_proj.weight

    @property
    def in_proj_bias(self) -> torch.Tensor | None:
        """The bias of the joint input projection."""
        return self.in_proj.bias

    @staticmethod
    def refusal(attention: nn.MultiheadAttention) -> str | None:
        """Why ``attention`` has to stay in float, or None."""
        if not attention._qkv_same_embed_dim:
            return "its key or value size differs from the query's"
        if attention.bias_k is not None or attention.add_zero_attn:
            return "it appends to keys and values (add_bias_kv or add_zero_attn)"
        return None

    @classmethod
    def from_float(cls, attention: nn.MultiheadAttention) -> DynamicMultiheadAttention:
        """The int8 form of a float ``attention``."""
        if (why := cls.refusal(attention)) is not None:
            raise InvalidInputError(f"the attention cannot be quantized: {why}")
        bias = float_bias(attention.in_proj_bias)
        found = cls(
            DynamicLinear(*quantize_weight(attention.in_proj_weight), bias),
            DynamicLinear.from_float(attention.out_proj),
            attention.num_heads,
            attention.batch_first,
            attention.dropout,
        ).train(attention.training)
        carry_attributes(attention, found)
        return found

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``nn.MultiheadAttention.forward``; ``is_causal`` is a hint that is not needed."""
        if self._converts(query):
            given = (query, key, value, key_padding_mask, need_weights, attn_mask)
            result = self.forward(*in_float32((*given, average_attn_weights, is_causal)))
            converted: tuple[torch.Tensor, Any] = in_float_type(result, query.dtype)
            return converted
        if is_causal and attn_mask is None:
            raise InvalidInputError("is_causal is a hint: give the causal attn_mask as well")
        batched = query.dim() == 3
        sequences = [(query, key, value), (query,)][query is key is value]
        if not batched:
            sequences = tuple(x.unsqueeze(0) for x in sequences)
        elif not self.batch_first:
            sequences = tuple(x.transpose(0, 1) for x in sequences)
        q, k, v = (self._heads(x) for x in self._project(*sequences))
        mask = _additive_mask(attn_mask, key_padding_mask, self.num_heads, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = F.dropout(weights, dropout)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _project(self, *sequences: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values; one sequence is all three."""
        if len(sequences) == 1:
            joint: torch.Tensor = self.in_proj(sequences[0])
            return joint.chunk(3, -1)
        return tuple(part(x) for part, x in zip(self._parts(), sequences, strict=True))

    def _parts(self) -> tuple[DynamicLinear, ...]:
        """The input projection of queries, of keys and of values, each on its own."""
        whole = self.in_proj
        if isinstance(whole.int8_weight, FakeTensor):  # no memory to tell writes by
            return whole.chunk(3)
        now = linear_packs.stamp(whole.int8_weight, whole.weight_scale, whole.bias)
        if self._split is None or self._split[0] != now:
            self._split = (now, whole.chunk(3))
        return self._split[1]

    @property
    def separate_parts(self) -> tuple[DynamicLinear, ...]:
        """What projects queries, keys and values where they differ, if that happened so far."""
        return () if self._split is None else self._split[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_split": None}  # views of the state

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, embed] as [batch, heads, length, embed / heads]."""
        each = self.embed_dim // self.num_heads  # not -1: a batch may be empty
        return x.reshape(*x.shape[:2], self.num_heads, each).transpose(1, 2)


def _additive_mask(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    heads: int,
    like: torch.Tensor,
) -> torch.Tensor | None:
    """Both masks as one that is added to the scores [batch, heads, queries, keys]."""
    if attn_mask is not None:
        attn_mask = _in_float(attn_mask, like)
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.reshape(-1, heads, *attn_mask.shape[1:])
    if key_padding_mask is None:
        return attn_mask
    padding = _in_float(key_padding_mask, like)
    padding = padding.reshape(-1, 1, 1, padding.shape[-1])
    return padding if attn_mask is None else attn_mask + padding


def _in_float(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask as torch adds it: where a boolean one is True, minus infinity."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill_(mask, -torch.inf)
