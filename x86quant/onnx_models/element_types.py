"""ONNX's types of elements as PyTorch's."""

from __future__ import annotations

import torch

from x86quant.errors import UnsupportedError

#: By the numbers of ``TensorProto.DataType``, which are part of the format.
_DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
}
#: Types with which PyTorch stores values, but computes little.
UNSIGNED = frozenset([4, 12, 13])


def torch_dtype(elements: int, where: str) -> torch.dtype:
    """The dtype of elements of this type.

    Raises:
        UnsupportedError: there is none; ``where`` says whose it would be.
    """
    if elements not in _DTYPES:
        raise UnsupportedError(f"{where} is of {type_name(elements)}, which is not read")
    return _DTYPES[elements]


def onnx_type(dtype: torch.dtype) -> int:
    """The type of elements of this dtype."""
    return next(elements for elements, one in _DTYPES.items() if one is dtype)


def type_name(elements: int) -> str:
    """What ONNX calls this type."""
    from onnx import TensorProto

    known = TensorProto.DataType.values()
    return f"type {TensorProto.DataType.Name(elements) if elements in known else elements}"
