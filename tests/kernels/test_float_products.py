"""Products of floats: every level gives the plain loops' bytes, and writes nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.native import capi
from tests.native.capi_floats import float_functions, float_product, float_taps
from tests.native.levels import ISAS
from x86quant import extension
from x86quant.ops.float_conv import FUNCTIONS


@pytest.fixture(scope="module")
def lib() -> capi.Library:
    return capi.Library(Path(extension.__file__).with_name("_C.so"))  # what ships


@pytest.mark.parametrize("isa", ISAS)
def test_products(lib: capi.Library, isa: str) -> None:
    """Each number of rows and vectors that a tile may be left with; sums of several stretches."""
    rng = np.random.default_rng(0)
    cases = [(rows, 7, outputs) for rows in range(1, 16) for outputs in (3, 16, 24, 70, 80, 131)]
    for rows, features, outputs in [*cases, (5, 1, 1), (13, 512, 40), (14, 1300, 70)]:
        panels = -(-outputs // 16)
        x = rng.normal(0, 1, (rows, features)).astype(np.float32)
        weight = rng.normal(0, 1, (panels, features, 16)).astype(np.float32)
        bias = rng.normal(0, 1, outputs).astype(np.float32)
        found = float_product(lib, isa, x, weight, bias, outputs + 2)
        same = float_product(lib, "reference", x, weight, bias, outputs + 2)
        assert np.array_equal(found, same, equal_nan=True)
        assert np.isnan(found[:, outputs:]).all()
        parts = [1, features - 1] if features > 2 else []
        assert np.array_equal(
            float_product(lib, isa, x, weight, bias, outputs + 2, parts), same, equal_nan=True
        )
        exact = x.astype(np.float64) @ weight.transpose(1, 0, 2).reshape(features, -1)[:, :outputs]
        np.testing.assert_allclose(found[:, :outputs], exact + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_taps(lib: capi.Library, isa: str) -> None:
    rng = np.random.default_rng(1)
    for channels in (1, 7, 8, 16, 19, 40):
        for count in (1, 5, 6, 13):
            pixels = rng.normal(0, 1, (count + 4, channels)).astype(np.float32)
            weight = rng.normal(0, 1, (9, channels)).astype(np.float32)
            bias = rng.normal(0, 1, channels).astype(np.float32)
            taps = np.array([0, 2, 4]) * channels, np.array([8, 1, 3])
            found = float_taps(lib, isa, pixels, weight, bias, taps, count)
            same = float_taps(lib, "reference", pixels, weight, bias, taps, count)
            assert np.array_equal(found, same, equal_nan=True)
            assert np.isnan(found[:, channels]).all()
            shifted = [pixels[i : i + count] * weight[w] for i, w in ((0, 8), (2, 1), (4, 3))]
            np.testing.assert_allclose(found[:, :-1], sum(shifted) + bias, rtol=1e-5, atol=1e-5)


def _function(name: str, number: float, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return {
        "add": y + number, "mul": y * number, "least": y.clamp(min=number),
        "most": y.clamp(max=number), "sigmoid": y.sigmoid(), "tanh": y.tanh(),
        "times_x": y * x, "x": y,
    }[name]  # fmt: skip


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(lib: capi.Library, isa: str, name: str) -> None:
    """Behind an addition, so that x is not y; of no whole number of vectors; NaN stays."""
    x = torch.cat([torch.linspace(-20, 20, 201), torch.tensor([torch.nan, torch.inf, -torch.inf])])
    for count in (1, 3, 16, 71, 204):
        some = x[-count:].contiguous()
        chain = [(FUNCTIONS.index("add"), 1.5), (FUNCTIONS.index(name), 0.75)]
        found = float_functions(lib, isa, chain, some.numpy())
        wanted = _function(name, 0.75, some + 1.5, some)
        torch.testing.assert_close(
            torch.from_numpy(found), wanted, equal_nan=True, rtol=2e-6, atol=1e-6
        )


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_x_becomes_what_was_computed(lib: capi.Library, isa: str) -> None:
    chain = [(FUNCTIONS.index(name), number) for name, number in
             (("mul", 3.0), ("x", 0.0), ("add", 2.0), ("times_x", 0.0))]  # fmt: skip
    found = float_functions(lib, isa, chain, np.arange(100, dtype=np.float32))
    x = 3 * np.arange(100, dtype=np.float32)
    assert np.array_equal(found, (x + 2) * x)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("across", [3, 5])
def test_taps_that_follow_one_another(lib: capi.Library, isa: str, across: int) -> None:
    """Two lines of taps, which neighbours share."""
    rng = np.random.default_rng(across)
    for channels in (3, 16, 40):
        for count in (2, 6, 19):
            pixels = rng.normal(0, 1, (2 * count + 2 * across, channels)).astype(np.float32)
            weight = rng.normal(0, 1, (2 * across, channels)).astype(np.float32)
            bias = rng.normal(0, 1, channels).astype(np.float32)
            line = np.arange(across)
            places = np.concatenate([line, line + count + across]) * channels
            taps = places, np.arange(2 * across)
            found = float_taps(lib, isa, pixels, weight, bias, taps, count, across)
            same = float_taps(lib, "reference", pixels, weight, bias, taps, count)
            assert np.array_equal(found, same, equal_nan=True)
