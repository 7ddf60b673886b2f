"""Weights that torchao has quantized: their own codes and scales, in our form.

torchao keeps codes, scales and what it does with an input in one tensor, in place of the weight.
Its classes are told by name, so that torchao need not be imported to look at an ordinary weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from x86quant.errors import UnsupportedError
from x86quant.ops.groups import GROUP_STEP, ZERO, exact_half, fit_nibbles, pack_nibbles

#: What a reader below knows of a tensor of torchao's. One with more than that, of a later version
#: perhaps, means something that was not seen here.
_KNOWN = frozenset(
    {"qdata", "scale", "zero_point", "scale_and_zero", "block_size", "dtype", "shape"}
    | {
        "activation_dtype",
        "target_dtype",
        "activation_quantization",
        "act_quant_kwargs",
        "reduce_range",
    }
    | {"act_pre_scale", "act_quant_scale", "act_quant_zero_point"}
)
#: What is done to an input before it is quantized, or by what.
OF_INPUTS = ("act_pre_scale", "act_quant_scale")
_NAMES = tuple(
    f"{optional}tensor_{kind}_names"
    for optional in ("", "optional_")
    for kind in ("data", "attribute")
)

Operands = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of torchao's as files hold it, by the names that it has in memory."""

    kind: str
    shape: tuple[int, ...]
    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None

    def codes(self) -> Operands:
        """Its codes and scales, as of the tensor itself.

        Raises:
            UnsupportedError: it is one that cannot be read.
        """
        return reader_of(self)(self)


def is_torchao(weight: torch.Tensor) -> bool:
    """Whether ``weight`` is one of torchao's tensors, which few functions of torch take."""
    return type(weight).__module__.startswith("torchao.")


def codes_of_torchao(weight: torch.Tensor) -> Operands | None:
    """The codes and scales of a tensor of torchao's; None of an ordinary weight.

    Raises:
        UnsupportedError: it is one that cannot be read, or that says more about a layer than that.
    """
    if not is_torchao(weight):
        return None
    more = [name for name in OF_INPUTS if getattr(weight, name, None) is not None]
    if more:
        raise refusal(weight, f"which changes inputs as well ({', '.join(more)})")
    return stored_codes(weight)


def stored_codes(weight: torch.Tensor) -> Operands:
    """The codes and scales of a tensor of torchao's, whatever it says about inputs.

    They have a scale a row, or one for each group of features, and then a zero point perhaps. Of
    codes from -8 to 7 with groups two are in a byte.

    Raises:
        UnsupportedError: it is one that cannot be read.
    """
    read = reader_of(weight)
    held = {name for names in _NAMES for name in getattr(weight, names, ())}
    more = [name for name in sorted(held - _KNOWN) if getattr(weight, name, None) is not None]
    if more:
        raise refusal(weight, f"which has more than codes and scales: {', '.join(more)}")
    return read(weight)


def reader_of(weight: Any) -> Callable[[Any], Operands]:
    """What reads ``weight``.

    Raises:
        UnsupportedError: nothing does.
    """
    kind = _kind_of(weight)
    if (why := why_not_read(kind)) is not None:
        raise refusal(weight, why)
    return _READERS[kind]


def why_not_read(kind: str) -> str | None:
    """Why tensors of the class called ``kind`` cannot be read; None if they can."""
    if kind in _READERS:
        return None
    return _OF_OTHER_DEVICES.get(kind, "which is no form of int8 or int4 that is known here")


def _kind_of(weight: Any) -> str:
    return weight.kind if isinstance(weight, StoredTensor) else type(weight).__name__


def _int8_codes(weight: Any) -> Operands:
    """Of codes that take a byte each, whatever their bits."""
    codes, scale, zero_point = weight.qdata, weight.scale, weight.zero_point
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise refusal(weight, f"whose codes are {codes.dtype} of shape {tuple(codes.shape)}")
    codes, real = codes.detach().clone(), scale.detach().to(torch.float32)
    shifted = zero_point is not None and bool(zero_point.any())
    rows = codes.shape[0]
    if scale.numel() == 1:  # of the whole weight
        real = real.reshape(1, 1).expand(rows, 1)
        zero_point = zero_point.reshape(1, 1).expand(rows, 1) if shifted else None
    if real.shape == (rows, 1) and not shifted:
        return codes, real.flatten().clone()
    if shifted and zero_point.shape != real.shape:
        raise refusal(weight, "whose zero points are not as many as its scales")
    offset = -real * zero_point.to(torch.float32) if shifted else None
    return _grouped(weight, codes, real, offset)


def _two_a_byte(weight: Any) -> Operands:
    """Of codes of 4 bits, the first of two in the low half, with a sign.

    Groups have a scale and the real value that the code 0 stands for, [groups, N].
    """
    # A sign in four bits and a number that counts from 8 differ in the highest of them.
    both = torch.stack([weight.qdata & 15, weight.qdata >> 4 & 15], -1).flatten(-2)
    codes = (both ^ ZERO).to(torch.int8) - ZERO
    if codes.dim() != 2 or weight.scale.dim() != 2:
        raise refusal(weight, f"whose codes are of shape {tuple(weight.qdata.shape)}")
    scale = weight.scale.detach().to(torch.float32).t()
    zero = weight.zero_point
    offset = None if zero is None or not bool(zero.any()) else zero.detach().float().t()
    return _grouped(weight, codes, scale, offset)


def _packed_for_cpu(weight: Any) -> Operands:
    """Of codes of 4 bits that ``aten::_convert_weight_to_int4pack_for_cpu`` has packed.

    They stand for themselves less 8, and groups have a scale and the real value of that zero.
    """
    packed, pairs = weight.qdata, weight.scale_and_zero
    order = _order_of_packing(weight.shape)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten()
    codes = torch.empty_like(nibbles).index_copy_(0, order, nibbles).reshape(weight.shape)
    scale, zero = pairs.detach().to(torch.float32).transpose(0, 1).unbind(-1)
    return _grouped(weight, codes.to(torch.int8) - ZERO, scale, zero if bool(zero.any()) else None)


def _order_of_packing(shape: torch.Size) -> torch.Tensor:
    """The place in a weight of ``shape`` of each half of a byte, in the order they are packed in.

    That order depends on the CPU and is nowhere written down: the places themselves are packed,
    four bits of each at a time.
    """
    places = torch.arange(shape.numel(), dtype=torch.int64).reshape(shape)
    order = torch.zeros(shape.numel(), dtype=torch.int64)
    for bit in range(0, shape.numel().bit_length(), 4):
        digit = (places >> bit & 15).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(digit, 1)
        order |= torch.stack([packed & 15, packed >> 4], -1).flatten().to(torch.int64) << bit
    return order


def _grouped(
    weight: Any, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None
) -> Operands:
    """Codes [N, K] with a scale, and perhaps an offset, for each group: [N, groups]."""
    groups = scale.shape[-1]
    fits = scale.shape == (codes.shape[0], groups) and groups > 0
    if not fits or codes.shape[1] % groups or codes.shape[1] // groups % GROUP_STEP:
        raise refusal(
            weight,
            f"whose scales {tuple(scale.shape)} do not stand for groups of a multiple of "
            f"{GROUP_STEP} features",
        )
    real = scale if offset is None else torch.stack([scale, offset], -1)
    return pack_nibbles(codes) if fit_nibbles(codes) else codes, exact_half(real)


_READERS: dict[str, Callable[[Any], Operands]] = {
    "Int8Tensor": _int8_codes,
    "IntxUnpackedToInt8Tensor": _int8_codes,
    "Int4Tensor": _two_a_byte,
    "Int4OpaqueTensor": _packed_for_cpu,
}
#: Forms of 4 bits in an order that a device's kernels want.
_OF_OTHER_DEVICES = {
    "Int4TilePackedTo4dTensor": "whose codes lie in the tiles of a CUDA kernel",
    "Int4PreshuffledTensor": "whose codes lie in the order of a CUDA kernel",
    "Int4PlainInt32Tensor": "whose codes lie in the order of an XPU's or NPU's kernel",
    "Int4MarlinSparseTensor": "whose codes lie in the order of a CUDA kernel",
}


def refusal(weight: Any, what: str) -> UnsupportedError:
    """That ``weight`` cannot be read, since it is ``what``."""
    return UnsupportedError(
        f"the weight of shape {tuple(weight.shape)} is torchao's {_kind_of(weight)}, {what}: "
        "give the float model, as it was before torchao's quantize_"
    )
