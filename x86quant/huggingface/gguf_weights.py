"""Blocks of GGUF files as weights of ours: their own codes, without a float weight on the way.

========  ====================================  ===================================================
type      a block                               becomes
========  ====================================  ===================================================
Q4_0      32 codes and a scale                  4 bits in groups of 32, the same numbers
Q4_1      the same and a minimum                4 bits in groups of 32 with offsets
Q5_0      32 codes of 5 bits and a scale        8 bits in groups of 32, the same numbers
Q5_1      the same and a minimum                8 bits in groups of 32 with offsets
Q8_0      32 codes of 8 bits and a scale        8 bits in groups of 32, the same numbers
IQ4_NL    32 places in a table and a scale      8 bits in groups of 32, the same numbers
IQ4_XS    8 times such, scales of a scale       8 bits in groups of 32
Q2_K      16 times 16 codes of 2 bits, minima   4 bits in groups of 16 with offsets
Q3_K      16 times 16 codes of 3 bits           4 bits in groups of 16
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
#: Numbers that are looked at together: what is between bytes and codes stays small.
_TOGETHER = 2**20
_FOUR_BITS = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K")
#: What the places 0 to 15 of IQ4 types stand for.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_EVEN_BITS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]


def group_weights(tensor: GgufTensor) -> GroupWeights:
    """The codes and scales of a matrix in one of the types of the table above."""
    rows, features = tensor.shape
    kind, read = tensor.kind, _READERS[tensor.kind.name]
    weight = scales = torch.empty(0, dtype=torch.uint8)
    together = max(1, _TOGETHER // features)
    for first in range(0, rows, together):
        here = slice(first, first + together)
        codes, some = read(tensor.blocks[here].reshape(-1, kind.nbytes))
        if not bool(torch.isfinite(some).all()):
            raise InvalidInputError(
                f"scales of its {kind.name} blocks are NaN or infinite: the file is damaged"
            )
        codes = codes.reshape(-1, features)
        codes = pack_nibbles(codes) if kind.name in _FOUR_BITS else codes
        some = some.reshape(len(codes), -1, *some.shape[2:])
        if first == 0:
            weight = codes.new_empty((rows, *codes.shape[1:]))
            scales = some.new_empty((rows, *some.shape[1:]))
        weight[here], scales[here] = codes, some
    weight_scale = exact_half(scales)
    check_groups("linear", weight, weight_scale)
    return GroupWeights(weight, weight_scale)


def is_matrix_of_codes(tensor: GgufTensor) -> bool:
    """Whether ``group_weights`` reads ``tensor``."""
    return len(tensor.shape) == 2 and tensor.kind.name in _READERS


def real_numbers(tensor: GgufTensor) -> torch.Tensor:
    """The float32 numbers of a tensor, whatever its type."""
    kind = tensor.kind.name
    if kind in _FLOATS:
        found = tensor.blocks.reshape(-1).view(_FLOATS[kind]).to(torch.float32, copy=True)
        return found.reshape(tensor.shape)
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


def _five_bits(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """32 codes a block: their low halves, and the fifth bits one behind the other in 4 bytes."""
    bits = torch.arange(8, dtype=torch.uint8)
    fifth = (high[..., None] >> bits & 1).flatten(1).to(torch.int8)
    return _low_and_high(low) + 16 * fifth


def _q5_0(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    return _five_bits(blocks[:, 6:], blocks[:, 2:6]) - 16, _halves(blocks, 0)


def _q5_1(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.stack([_halves(blocks, 0), _halves(blocks, 2)], -1)
    return _five_bits(blocks[:, 8:], blocks[:, 4:8]), scales


def _iq4_codes(part: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_IQ4, dtype=torch.int8)[_low_and_high(part).int()]


def _iq4_nl(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    return _iq4_codes(blocks[:, 2:]), _halves(blocks, 0)


def _iq4_xs(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).flatten(1)
    high = (blocks[:, 2:4, None] >> _EVEN_BITS[:, 0] & 3).flatten(1)
    scales = (low | high << 4).float() - 32
    codes = _iq4_codes(torch.unflatten(blocks[:, 8:], 1, (8, 16)))
    return codes.flatten(1), _halves(blocks, 0) * scales


def _two_bits(part: torch.Tensor) -> torch.Tensor:
    """256 codes of 2 bits: of each 32 bytes the lowest two bits, then the next ones."""
    return (torch.unflatten(part, 1, (2, 1, 32)) >> _EVEN_BITS & 3).to(torch.int8).flatten(1)


def _q2_k(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _halves(blocks, 80) * (blocks[:, :16] & 15).float()
    least = _halves(blocks, 82) * (blocks[:, :16] >> 4).float()
    return _two_bits(blocks[:, 16:80]), torch.stack([scale, -least], -1)


def _q3_k(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    third = (blocks[:, None, :32] >> bits & 1).to(torch.int8).flatten(1)
    low = torch.cat([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], -1)
    high = (blocks[:, None, 104:108] >> _EVEN_BITS & 3).flatten(1)
    scales = (low | high << 4).float() - 32
    return _two_bits(blocks[:, 32:96]) + 4 * third - 4, _halves(blocks, 108) * scales


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
    codes = low.flatten(1) + 16 * _two_bits(blocks[:, 128:192]) - 32
    parts = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return codes, parts * _halves(blocks, 208)


_READERS: dict[str, Callable[[_Blocks], tuple[torch.Tensor, torch.Tensor]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
