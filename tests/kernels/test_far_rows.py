"""Products of rows that lie pages apart, whose lines share a set of L1: they are copied first."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.row_calls import at_page_end, lib
from tests.native import capi
from tests.native.levels import ISAS

__all__ = ["lib"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 7, 8, 33, 70])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("channels", [4096, 4090, 4000])  # of rows of 4096
def test_bytes_are_those_of_the_plain_loops(
    lib: capi.Library, isa: str, rows: int, residual: bool, channels: int
) -> None:
    rng = np.random.default_rng(rows)
    outputs = 140
    weight = rng.integers(-127, 128, (outputs, channels, 1, 1, 1)).astype(np.int8)
    spec = capi.ConvSpec(
        weight,
        np.full(outputs, 3e-5, np.float32),
        in_zp=7,
        out_zp=100,
        residual=residual,
        res_zp=11,
        res_mult=0.7,
    )
    whole = at_page_end(rng.integers(0, 256, (1, 1, 1, rows, 4096)).astype(np.uint8))
    x = whole[..., 4096 - channels :]
    more = rng.integers(0, 256, (1, 1, 1, rows, outputs)).astype(np.uint8)
    want = np.zeros_like(more)
    lib.conv(lib.pack(spec, "reference"), x, want, more if residual else None)
    assert len(np.unique(want)) > 2
    packed = lib.pack(spec, isa)
    for threads in (1, 3):
        got = np.zeros_like(more)
        lib.conv(packed, x, got, more if residual else None, threads=threads)
        np.testing.assert_array_equal(got, want)
