"""Linears whose weights have scales for groups of features: every level against plain torch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.row_calls import LEVELS, lib
from tests.kernels.test_row_kernels import ACTIVATIONS, Call
from tests.native import capi
from x86quant.ops import rows
from x86quant.ops.groups import pack_nibbles
from x86quant.ops.rows import quantize_rows

__all__ = ["lib"]
DEFINED: Any = rows  # arguments in a star are beyond mypy

#: Bits, largest code, type of scales, whether there are offsets.
KINDS = [
    (4, 7, torch.float16, False),
    (4, 7, torch.float16, True),
    (4, 7, torch.float32, True),
    (8, 127, torch.float16, False),
    (8, 64, torch.float32, True),  # narrow: pairs of products fit 16 bits
]
#: Rows, features, features of a group, outputs.
SIZES = [
    (1, 32, 32, 1),
    (1, 256, 64, 70),
    (2, 96, 32, 33),
    (3, 40, 8, 17),
    (4, 128, 128, 64),
    (5, 192, 48, 31),
    (7, 64, 16, 48),
    (29, 160, 32, 40),
    (34, 96, 24, 9),
    # Blocks of weights that are unpacked for many rows: pieces of them, and rows past one passage.
    (13, 64, 32, 18),
    (125, 2112, 48, 17),
    (19, 1056, 32, 40),
    (16, 2048, 1024, 24),
    (14, 2080, 1040, 9),  # too long to be unpacked
]


def weights(bits: int, most: int, dtype: torch.dtype, offsets: bool, *sizes: int, seed: int) -> Any:
    """Codes to the ends of their range, scales of both signs, biases."""
    draw = torch.Generator().manual_seed(seed)
    features, group, outputs = sizes
    codes = torch.randint(-most - 1, most + 1, (outputs, features), generator=draw)
    codes = codes.to(torch.int8)
    shape = (outputs, features // group, 2) if offsets else (outputs, features // group)
    scale = (torch.randn(shape, generator=draw) * 0.01).to(dtype)
    bias = torch.randn(outputs, generator=draw)
    return pack_nibbles(codes) if bits == 4 else codes, scale, bias


def product(
    lib: capi.Library, isa: str, codes: Any, operands: Any, activation: int = 0, threads: int = 1
) -> torch.Tensor:
    """The product by packed weights of ``isa``, where all operands end with a page."""
    weight, scale, bias = operands
    packed = lib.pack_groups(
        np.ascontiguousarray(weight.numpy()), scale.numpy(), bias.numpy(), isa, activation
    )
    call = Call(isa, codes[0].shape[0], weight.shape[0], threads)
    call.op.packed = packed.ctypes.data
    call.read(codes)
    found = call.want("total")
    lib.rows(call.op)
    return torch.from_numpy(np.array(found["total"][0]))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_level_gives_the_bytes_of_the_definition(
    lib: capi.Library, isa: str, kind: Any
) -> None:
    for seed, (count, *sizes) in enumerate(SIZES):
        operands = weights(*kind, *sizes, seed=seed)
        x = torch.randn(count, sizes[0], generator=torch.Generator().manual_seed(seed))
        if count > 2:
            x[1], x[2, -1] = 0, torch.nan
        codes = quantize_rows(x)
        want = DEFINED.linear_rows(*codes, *operands)
        for threads in (1, 3):
            got = product(lib, isa, codes, operands, threads=threads)
            assert torch.equal(got.nan_to_num(7e9), want.nan_to_num(7e9)), (sizes, threads)


@pytest.mark.parametrize("isa", LEVELS)
def test_activations(lib: capi.Library, isa: str) -> None:
    operands = weights(*KINDS[0], 64, 32, 40, seed=3)
    codes = quantize_rows(torch.randn(5, 64, generator=torch.Generator().manual_seed(3)) * 9)
    for activation, name in enumerate(ACTIVATIONS):
        want = DEFINED.linear_rows(*codes, *operands, name)
        got = product(lib, isa, codes, operands, activation)
        assert bool(((got - want).abs() <= 1e-6 * (1 + want.abs())).all()), name


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_extremes_leave_no_16_bits(lib: capi.Library, isa: str, bits: int) -> None:
    """The largest codes by weights of one sign: what saturates first, if anything does."""
    ends = (-8, 7) if bits == 4 else (-128, -65, -64, 64, 65, 127)
    for weight, count, groups in itertools.product(ends, (1, 6, 13), (1, 2, 4)):
        codes = torch.full((40, 128), weight, dtype=torch.int8)
        scale = torch.ones(40, groups, dtype=torch.float16)
        operands = (pack_nibbles(codes) if bits == 4 else codes, scale, torch.zeros(40))
        rows = (
            torch.full((count, 128), 255, dtype=torch.uint8),
            torch.ones(count),
            torch.zeros(count, dtype=torch.int32),
        )
        assert bool((product(lib, isa, rows, operands) == 128 * 255 * weight).all()), weight


def test_what_is_no_linear_is_refused(lib: capi.Library) -> None:
    weight, scale = np.zeros((4, 24), np.uint8), np.ones((4, 3), np.float16)
    lib.pack_groups(weight, scale, None, LEVELS[-1])
    for groups in (5, 4, 0):  # which do not divide 48, or by what is no multiple of 8
        with pytest.raises(capi.NativeError):
            lib.pack_groups(weight, np.ones((4, groups), np.float16), None, LEVELS[-1])
