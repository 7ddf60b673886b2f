"""The arithmetic that every op shares: codes to reals and back, checks, memory layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from x86quant.errors import InvalidInputError

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


_steps_wanted: ContextVar[bool] = ContextVar("_steps_wanted", default=False)


def has_values(x: torch.Tensor) -> bool:
    """Whether more of ``x`` is asked for than a shape.

    Plans and exports ask for the shape of every op, and with free sizes torch takes milliseconds
    for each step of one.
    """
    return _steps_wanted.get() or not (x.is_meta or isinstance(x, FakeTensor))


def with_values(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` with all of its steps, also where a tracer asks with tensors without values."""

    @functools.wraps(op)
    def spelled(*args: Any, **kwargs: Any) -> Any:
        before = _steps_wanted.set(True)
        try:
            return op(*args, **kwargs)
        finally:
            _steps_wanted.reset(before)

    return spelled


def like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The shape of a result of ops, for ``x`` without values."""
    layout = _LAST.get(x.dim(), torch.contiguous_format)
    return torch.empty_like(x, dtype=dtype, memory_format=layout)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the layout ops return: channels last for rank 4 and 5, else contiguous."""
    return x.contiguous(memory_format=_LAST.get(x.dim(), torch.contiguous_format))


def centred(x: torch.Tensor, zero_point: int) -> torch.Tensor:
    """Codes minus their zero point, as float32 (exact)."""
    real = x.to(torch.float32)
    return real - zero_point if has_values(x) else real


def codes(
    steps: torch.Tensor,
    zero_point: int,
    lo: int = 0,
    hi: int = 255,
    lut: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round ``steps`` (a real value over the output scale) half to even, shift, clamp, look up.

    NaN becomes ``lo``, as it does with a SIMD maximum.
    """
    if not has_values(steps):
        return like(steps, torch.uint8)
    shifted = torch.round(steps) + zero_point
    clamped = torch.nan_to_num(shifted, nan=lo).clamp(lo, hi).to(torch.uint8)
    return channels_last(clamped if lut is None else lookup(clamped, lut))


def lookup(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``table[x]`` for uint8 codes ``x``."""
    # Flat, because an index without dimensions would be taken for a number.
    return table[x.flatten().to(torch.int64)].reshape(x.shape)


def check_codes(op: str, **tensors: torch.Tensor | None) -> None:
    """Every given tensor holds uint8 codes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.uint8:
            raise InvalidInputError(
                f"x86quant::{op}: {name} must be uint8 codes, got {tensor.dtype}; "
                "quantize float tensors with x86quant::quantize first"
            )


def check_qparams(op: str, scale: float, zero_point: int) -> None:
    """A scale is positive and finite, and a zero point is a uint8 code."""
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidInputError(f"x86quant::{op}: scale must be positive and finite, got {scale}")
    if not 0 <= zero_point <= 255:
        raise InvalidInputError(f"x86quant::{op}: zero point must be in 0..255, got {zero_point}")


def check_clamp(op: str, lo: int, hi: int) -> None:
    """The clamp bounds are ordered uint8 codes."""
    if not 0 <= lo <= hi <= 255:
        raise InvalidInputError(f"x86quant::{op}: need 0 <= lo <= hi <= 255, got {lo} and {hi}")


def check_table(op: str, table: torch.Tensor | None, dtype: torch.dtype = torch.uint8) -> None:
    """A look-up table is 256 codes, or as many floats."""
    if table is not None and (tuple(table.shape) != (256,) or table.dtype != dtype):
        values = "uint8 codes" if dtype == torch.uint8 else "floats"
        raise InvalidInputError(
            f"x86quant::{op}: a table is 256 {values}, got {table.dtype} {tuple(table.shape)}"
        )
