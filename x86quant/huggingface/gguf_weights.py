"""Blocks of GGUF files as weights of ours: their own codes, without a float weight on the way.

========  ====================================  ===================================================
type      a block                               becomes
========  ====================================  ===================================================
Q4_0      32 codes and a scale                  4 bits in groups of 32, the same numbers
Q4_1      the same and a minimum                4 bits in groups of 32 with offsets
Q8_0      32 codes of 8 bits and a scale        8 bits in groups of 32, the same numbers
Q4_K      8 times 32 codes, scales of scales    4 bits in groups of 32 with offsets
Q5_K      the same with codes of 5 bits         8 bits in groups of 32 with offsets
Q6_K      16 times 16 codes of 6 bits           8 bits in groups of 16
========  ====================================  ===================================================

Scales are float16 where they are numbers of float16, else float32: a product of two scales is exact
in that, and an offset is off by its rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from x86quant.errors import InvalidInputError
from x86quant.huggingface.gguf_file import GgufTensor
from x86quant.huggingface.group_formats import GroupWeights
from x86quant.ops.groups import ZERO, check_groups, exact_half, pack_nibbles

_Blocks = torch.Tensor


def group_weights(tensor: GgufTensor) -> GroupWeights:
    """The codes and scales of a matrix in one of the types of the table above."""
    rows, features = tensor.shape
    size = tensor.kind.nbytes
    blocks = tensor.blocks.reshape(-1, size)  # [blocks, bytes]
    codes, scales = _READERS[tensor.kind.name](blocks)
    if not bool(torch.isfinite(scales).all()):
        raise InvalidInputError(
            f"scales of its {tensor.kind.name} blocks are NaN or infinite: the file is damaged"
        )
    four = tensor.kind.name.startswith("Q4")
    weight = codes.reshape(rows, features)
    weight = pack_nibbles(weight) if four else weight
    trailing = (2,) if scales.dim() == 3 else ()
    weight_scale = exact_half(scales.reshape(rows, -1, *trailing))
    check_groups("linear", weight, weight_scale)
    return GroupWeights(weight, weight_scale)


def is_matrix_of_codes(tensor: GgufTensor) -> bool:
    """Whether ``group_weights`` reads ``tensor``."""
    return len(tensor.shape) == 2 and tensor.kind.name in _READERS


def real_numbers(tensor: GgufTensor) -> torch.Tensor:
    """The float32 numbers of a tensor, whatever its type."""
    kind = tensor.kind.name
    if kind in _FLOATS:
        return tensor.blocks.reshape(-1).view(_FLOATS[kind]).float().reshape(tensor.shape)
    codes, scales = _READERS[kind](tensor.blocks.reshape(-1, tensor.kind.nbytes))
    groups = codes.reshape(*scales.shape[:2], -1).float()
    if scales.dim() == 2:
        return (groups * scales[..., None]).reshape(tensor.shape)
    return (groups * scales[..., :1] + scales[..., 1:]).reshape(tensor.shape)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _halves(blocks: _Blocks, first: int, count: int = 1) -> torch.Tensor:
    """``count`` float16 numbers of each block, from a byte on, as float32 [blocks, count]."""
    part = blocks[:, first : first + 2 * count].contiguous()
    return part.view(torch.float16).float()


def _low_and_high(part: torch.Tensor) -> torch.Tensor:
    """The low halves of the bytes of each row, then the high ones, as int8."""
    return torch.cat([part & 15, part >> 4], -1).to(torch.int8)


def _q4_0(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    return _low_and_high(blocks[:, 2:]) - ZERO, _halves(blocks, 0)


def _q4_1(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    scale, least = _halves(blocks, 0), _halves(blocks, 2)
    return _low_and_high(blocks[:, 4:]) - ZERO, torch.stack([scale, least + ZERO * scale], -1)


def _q8_0(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    return blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0)


def _six_bits(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and eight minima of 6 bits that 12 bytes of each block hold."""
    a, b, c = part[:, :4], part[:, 4:8], part[:, 8:]
    scales = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], -1)
    least = torch.cat([b & 63, (c >> 4) | (b >> 6) << 4], -1)
    return scales.float(), least.float()


def _scales_of_k(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    scales, least = _six_bits(blocks[:, 4:16])
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * least


def _q4_k(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    scale, least = _scales_of_k(blocks)
    codes = _low_and_high(torch.unflatten(blocks[:, 16:], 1, (4, 32))) - ZERO
    return codes.flatten(1), torch.stack([scale, ZERO * scale - least], -1)


def _q5_k(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    scale, least = _scales_of_k(blocks)
    low = _low_and_high(torch.unflatten(blocks[:, 48:], 1, (4, 32))).reshape(-1, 8, 32)
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> bits & 1).to(torch.int8)  # [blocks, 8, 32]
    return (low + 16 * high).flatten(1), torch.stack([scale, -least], -1)


def _q6_k(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    low = _low_and_high(torch.unflatten(blocks[:, :128], 1, (2, 64))).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (torch.unflatten(blocks[:, 128:192], 1, (2, 1, 32)) >> shifts & 3).to(torch.int8)
    codes = (low + 16 * high).flatten(1) - 32
    parts = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return codes, parts * _halves(blocks, 208)


_READERS: dict[str, Callable[[_Blocks], tuple[torch.Tensor, torch.Tensor]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
