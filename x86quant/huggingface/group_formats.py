"""Linears of 4 and 8 bits as other libraries store them: their tensors as ours, bit for bit.

Each reader takes what a file holds of one layer and returns codes and scales in the form of
``x86quant/ops/groups.py``; the real weights are those that the format's own library makes, and no
float weight exists on the way. Layouts:

==================  ============================================================================
compressed-tensors  ``weight_packed`` int32 [N, K / 8], the first of eight codes in the lowest bits;
                    ``weight_scale`` [N, G]; ``weight_zero_point`` int32 [N / 8, G], packed along N;
                    codes and zero points less 8. Or unpacked: ``weight`` int8 [N, K],
                    ``weight_zero_point`` int8 [N, G]
GPTQ                ``qweight`` int32 [K / 8, N]; ``scales`` [G, N]; ``qzeros`` int32 [G, N / 8], in
                    files of version 1 one too small; ``g_idx`` [K], the group of a feature
AWQ                 ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [G, N / 8], eight codes in the
                    order 0, 2, 4, 6, 1, 3, 5, 7; ``scales`` [G, N]
==================  ============================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.ops.groups import (
    GROUP_STEP,
    ZERO,
    check_groups,
    codes_of,
    exact_half,
    fit_nibbles,
    pack_nibbles,
)

Tensors = Mapping[str, torch.Tensor]

#: AWQ's order: code i of eight lies at place _AWQ[i].
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupWeights:
    """A linear's weight as kernels take it.

    Attributes:
        weight, weight_scale: as ``x86quant/ops/groups.py`` says.
        order: the input feature that meets each column of the weight; None for its own place.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    order: torch.Tensor | None = None


Reader = Callable[[Tensors, int], GroupWeights]


def from_compressed_tensors(tensors: Tensors, features: int) -> GroupWeights:
    """A linear that compressed-tensors stored as ``pack-quantized``."""
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    bits = _bits(packed.shape[1], features)
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        unsigned = unpacked(zeros.t(), bits)[:, : scale.shape[0]].t()
        zeros = unsigned.to(torch.int32) - (1 << (bits - 1))
    weight = bytes_of(packed, bits)
    order = _order(tensors.get("weight_g_idx"), features // scale.shape[1])
    return _arranged(weight, scale, zeros, order)


def from_compressed_bytes(tensors: Tensors, features: int) -> GroupWeights:
    """A linear that compressed-tensors stored as ``int-quantized``: a byte for each weight."""
    codes, scale = tensors["weight"], tensors["weight_scale"]
    zeros = tensors.get("weight_zero_point")
    if scale.numel() == 1:  # of the whole weight
        scale = scale.reshape(1, 1).expand(codes.shape[0], 1)
        zeros = None if zeros is None else zeros.reshape(1, 1).expand(codes.shape[0], 1)
    scale = scale.reshape(codes.shape[0], -1)
    order = _order(tensors.get("weight_g_idx"), features // scale.shape[1])
    four = fit_nibbles(codes) and features % (scale.shape[1] * GROUP_STEP) == 0
    if scale.shape[1] == 1 and zeros is None and not four:
        return GroupWeights(codes, scale.flatten().float())
    zeros = None if zeros is None else zeros.to(torch.int32)
    return _arranged(pack_nibbles(codes) if four else codes, scale, zeros, order)


def from_gptq(tensors: Tensors, features: int, first_zero: int = 1) -> GroupWeights:
    """A linear that a GPTQ library stored; ``first_zero`` is 0 in files of version 2."""
    packed, scale = tensors["qweight"], tensors["scales"].t()
    bits = _bits(packed.shape[0], features)
    zeros = unpacked(tensors["qzeros"], bits).t()[: scale.shape[0]].to(torch.int32)
    zeros = (zeros + first_zero) % (1 << bits) - (1 << (bits - 1))
    weight = bytes_of(packed.t(), bits)
    order = _order(tensors.get("g_idx"), features // scale.shape[1])
    return _arranged(weight, scale, zeros, order)


def from_awq(tensors: Tensors, features: int) -> GroupWeights:
    """A linear that an AWQ library stored, by its GEMM version."""
    packed, scale = tensors["qweight"], tensors["scales"].t()
    if packed.shape[0] != features:
        raise UnsupportedError(
            f"AWQ's qweight is {tuple(packed.shape)} for {features} input features: what can be "
            'read is its version "gemm" of 4 bits'
        )
    codes, zeros = (_awq_order(tensors[name]) for name in ("qweight", "qzeros"))
    weight = pack_nibbles(codes.t().contiguous() - ZERO)
    return _arranged(weight, scale, zeros.t().to(torch.int32) - ZERO, None)


def _awq_order(packed: torch.Tensor) -> torch.Tensor:
    eights = torch.unflatten(unpacked(packed, 4), 1, (-1, 8))
    return eights[..., list(_AWQ)].flatten(1)


def _bits(words: int, features: int) -> int:
    """Bits of a code, where ``features`` of them fill so many int32."""
    bits = words * 32 // features if features else 0
    if bits not in (4, 8) or words * 32 != features * bits:
        raise UnsupportedError(
            f"{features} input features are stored in {words} words of 32 bits; what can be read "
            "are codes of 4 and of 8 bits"
        )
    return bits


def bytes_of(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words [N, ...] with the first code in the lowest bits as our codes [N, ...].

    Ours of 4 bits are the bytes of these words; of 8 bits they count from 128 less.
    """
    found = packed.contiguous().view(torch.uint8)
    return found if bits == 4 else (found ^ 128).view(torch.int8)


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes from 0 on of int32 words that hold them side by side; of 8 bits as int16."""
    found = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return found.to(torch.int16)
    return torch.stack([found & 15, found >> 4], -1).flatten(-2).to(torch.int8)


def _order(g_idx: torch.Tensor | None, group: int) -> torch.Tensor | None:
    """The features in the order of their groups; None if they are in it."""
    if g_idx is None or bool((g_idx < 0).all()):  # compressed-tensors fills it with -1
        return None
    order = torch.argsort(g_idx, stable=True)
    groups = torch.arange(len(g_idx), device=g_idx.device) // max(group, 1)
    if not torch.equal(g_idx[order].long(), groups):
        raise InvalidInputError(
            f"its g_idx does not give {group} features to each group; the file is damaged, or of "
            "another format"
        )
    return None if torch.equal(order, torch.arange(len(order))) else order


def _arranged(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor | None,
) -> GroupWeights:
    """Codes and scales of one linear, checked; ``zeros`` are zero points in our codes [N, G]."""
    scale = scale.contiguous()
    check_scales(scale)
    numbers = scale.float()
    if zeros is not None and bool(zeros.any()):
        numbers = torch.stack([numbers, -numbers * zeros], -1)
    found = exact_half(numbers)
    if order is not None:
        codes = codes_of(weight)[:, order]
        weight = codes if weight.dtype == torch.int8 else pack_nibbles(codes)
    check_groups("linear", weight, found)
    return GroupWeights(weight, found, order)


def check_scales(scale: torch.Tensor, may_be_zero: bool = False) -> None:
    """Raise InvalidInputError unless scales are finite and, where they may not be, not 0."""
    if not bool(torch.isfinite(scale).all()):
        raise InvalidInputError("its scales hold NaN or infinity: the checkpoint is damaged")
    if not may_be_zero and bool((scale == 0).any()):
        raise InvalidInputError("its scales hold zeros: the checkpoint is damaged")
