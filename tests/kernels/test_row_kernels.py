"""The native ops on row codes against their definitions in plain torch, level by level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.row_calls import LEVELS, OPS, Array, assert_same_codes, at_page_end, lib
from tests.native import capi
from tests.native.levels import ISAS
from x86quant.ops import rows
from x86quant.ops.rows import quantize_rows

__all__ = ["lib"]

DEFINED: Any = rows  # arguments in a star are beyond mypy


ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")


class Site:
    """Random rows, two products of them, and everything that may follow."""

    def __init__(self, rows: int, features: int, outputs: int, activation: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.activation = activation
        self.x = torch.randn(rows, features, generator=draw)
        if rows > 2:
            self.x[1] = 0
            self.x[2, -1] = torch.nan
        self.weights = torch.randint(-128, 128, (2, outputs, features), generator=draw).to(
            torch.int8
        )
        self.scales = torch.rand(2, outputs, generator=draw) * 0.01
        self.biases = torch.randn(2, outputs, generator=draw)
        self.residual = torch.randn(rows, outputs, generator=draw)
        self.norm: tuple[Any, Any] = tuple(torch.randn(2, outputs, generator=draw))  # type: ignore[assignment]
        self.codes = quantize_rows(self.x)

    def value(self, which: int) -> torch.Tensor:
        """The product by its definition."""
        activation = None if which else ACTIVATIONS[self.activation]
        operands = (self.weights[which], self.scales[which], self.biases[which])
        return DEFINED.linear_rows(*self.codes, *operands, activation)

    def packs(self, lib: capi.Library, isa: str) -> list[Array]:
        """Both products packed; the activation belongs to the first."""
        return [
            lib.pack_linear(
                self.weights[i].numpy(),
                self.scales[i].numpy(),
                self.biases[i].numpy(),
                isa,
                0 if i else self.activation,
            )
            for i in (0, 1)
        ]


class Call:
    """One call on guarded memory: every operand and result ends where a page does."""

    def __init__(self, isa: str, rows: int, features: int, threads: int) -> None:
        self.op = capi.Rows(capi.ISAS[isa], rows, features, threads=threads, eps=1e-5)
        self.kept: list[Array] = []
        self.shape = (rows, features)

    def put(self, array: Array) -> int:
        self.kept.append(at_page_end(array))
        return int(self.kept[-1].ctypes.data)

    def read(self, codes: tuple[torch.Tensor, ...]) -> None:
        self.op.in_ = capi.Codes(*(self.put(part.numpy()) for part in codes))

    def want(self, *names: str) -> dict[str, list[Array]]:
        found: dict[str, list[Array]] = {}
        rows, _ = self.shape
        for name in names:
            if name == "out":
                parts = [np.zeros(self.shape, np.uint8), np.zeros(rows, np.float32)]
                parts.append(np.zeros(rows, np.int32))
                at = [self.put(part) for part in parts]
                self.op.out = capi.Codes(*at)
                found[name] = self.kept[-3:]
            else:
                setattr(self.op, name, self.put(np.zeros(self.shape, np.float32)))
                found[name] = self.kept[-1:]
        return found


SHAPES = [
    (1, 1, 1),
    (3, 64, 32),
    (5, 70, 33),
    (31, 128, 16),
    (33, 64, 100),
    (70, 200, 90),
    (0, 64, 32),
    (3, 4096, 33),  # rows that lie pages apart
    (70, 4096, 90),
]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("features", [772, 1000])
def test_few_rows_whose_weights_come_from_memory(
    lib: capi.Library, isa: str, rows: int, features: int
) -> None:
    outputs = 70  # the last block has one vector
    site = Site(rows, features, outputs, activation=0, seed=rows + features)
    lib.set_caches(16 << 10, 64 << 10)  # whose half these weights exceed
    try:
        packed, _ = site.packs(lib, isa)
    finally:
        lib.set_caches(48 << 10, 512 << 10)
    call = Call(isa, rows, outputs, 1)
    call.op.packed = packed.ctypes.data
    call.read(site.codes)
    (total,) = call.want("total")["total"]
    lib.rows(call.op)
    np.testing.assert_array_equal(total, site.value(0).numpy())


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_what_torch_defines(
    lib: capi.Library, isa: str, threads: int, shape: tuple[int, int, int]
) -> None:
    rows, _, outputs = shape
    site = Site(*shape, activation=0, seed=sum(shape))
    packed, _ = site.packs(lib, isa)
    call = Call(isa, rows, outputs, threads)
    call.op.packed = packed.ctypes.data
    call.read(site.codes)
    got = call.want("total", "out")
    lib.rows(call.op)
    want = site.value(0)
    np.testing.assert_array_equal(got["total"][0], want.numpy())
    for mine, torchs in zip(got["out"], quantize_rows(want), strict=True):
        np.testing.assert_array_equal(mine, torchs.numpy())


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("activation", range(5))
def test_codes_alone_are_those_of_the_activated_product(
    lib: capi.Library, isa: str, activation: int
) -> None:
    site = Site(67, 96, 200, activation, seed=activation)
    packed, _ = site.packs(lib, isa)
    codes = []
    for threads, names in ((1, ("out",)), (8, ("out",)), (2, ("out", "total"))):
        call = Call(isa, 67, 200, threads)
        call.op.packed = packed.ctypes.data
        call.read(site.codes)
        got = call.want(*names)
        lib.rows(call.op)
        codes.append(got["out"])
    want = site.value(0)
    np.testing.assert_allclose(got["total"][0], want.numpy(), rtol=2e-6, atol=2e-6)
    exact = quantize_rows(torch.from_numpy(got["total"][0].copy()))
    for found in codes:
        for mine, torchs in zip(found, exact, strict=True):
            np.testing.assert_array_equal(mine, torchs.numpy())


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("shape", [(1, 64, 32), (35, 70, 33), (100, 64, 768)], ids=str)
def test_norms_of_sums_are_what_torch_defines(
    lib: capi.Library, isa: str, threads: int, kind: str, shape: tuple[int, int, int]
) -> None:
    rows, _, outputs = shape
    site = Site(*shape, activation=0, seed=3)
    packed, _ = site.packs(lib, isa)
    want = DEFINED.norm_rows(site.value(0), site.residual, *site.norm, 1e-5, kind, 7)
    for names in (("total", "normed", "out"), ("normed",), ("total", "out"), ("out",)):
        call = Call(isa, rows, outputs, threads)
        call.op.packed, call.op.norm = packed.ctypes.data, 1 if kind == "layer" else 2
        call.op.residual = call.put(site.residual.numpy())
        call.op.norm_weight, call.op.norm_bias = (call.put(part.numpy()) for part in site.norm)
        call.read(site.codes)
        got = call.want(*names)
        lib.rows(call.op)
        if "total" in got:
            np.testing.assert_array_equal(got["total"][0], want[0].numpy())
        if "normed" in got:
            np.testing.assert_allclose(got["normed"][0], want[1].numpy(), rtol=1e-5, atol=1e-5)
        if "out" in got:
            assert np.abs(got["out"][0].astype(int) - want[2].numpy()).max() <= 1
            np.testing.assert_allclose(got["out"][1], want[3].numpy(), rtol=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("threads", [1, 8])
def test_gates_multiply_two_products(lib: capi.Library, isa: str, threads: int) -> None:
    site = Site(40, 70, 150, activation=4, seed=1)
    packs = site.packs(lib, isa)
    call = Call(isa, 40, 150, threads)
    call.op.packed, call.op.up = (pack.ctypes.data for pack in packs)
    call.read(site.codes)
    got = call.want("out", "total")
    lib.rows(call.op)
    want = site.value(0) * site.value(1)
    np.testing.assert_allclose(got["total"][0], want.numpy(), rtol=1e-5, atol=1e-5)
    exact = quantize_rows(torch.from_numpy(got["total"][0].copy()))
    for mine, torchs in zip(got["out"], exact, strict=True):
        np.testing.assert_array_equal(mine, torchs.numpy())


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("features", [1, 5, 16, 63, 64, 100, 768])
def test_rows_are_quantized_and_normed_without_a_product(
    lib: capi.Library, isa: str, features: int
) -> None:
    site = Site(9, features, 1, activation=0, seed=2)
    call = Call(isa, 9, features, threads=2)
    call.op.x = call.put(site.x.numpy())
    got = call.want("out")
    lib.rows(call.op)
    for mine, torchs in zip(got["out"], site.codes, strict=True):
        np.testing.assert_array_equal(mine, torchs.numpy())
    call.op.norm, call.op.residual = 1, call.put(site.x.numpy())
    got = call.want("total", "normed", "out")
    lib.rows(call.op)
    want = DEFINED.norm_rows(site.x, site.x, None, None, 1e-5, "layer", 7)
    np.testing.assert_allclose(got["normed"][0], want[1].numpy(), rtol=1e-4, atol=1e-4)


def test_calls_that_do_not_fit_are_refused(lib: capi.Library) -> None:
    site = Site(4, 64, 32, activation=0, seed=0)
    packed, up = site.packs(lib, ISAS[-1])

    def call(**fields: object) -> None:
        made = Call(ISAS[-1], 4, 32, 1)
        made.op.packed = packed.ctypes.data
        made.read(site.codes)
        made.want("total")
        for name, value in fields.items():
            setattr(made.op, name, value)
        lib.rows(made.op)

    call()
    for wrong in (
        {"rows": -1},
        {"features": 31},
        {"isa": 0},
        {"isa": 9},
        {"threads": 0},
        {"norm": 3},
        {"eps": -1.0},
        {"eps": float("nan")},
        {"packed": packed.ctypes.data + 1},
        {"packed": None},
        {"in_": capi.Codes()},
        {"total": None},
        {"normed": packed.ctypes.data},
        {"out": capi.Codes(packed.ctypes.data)},
        {"packed": None, "up": up.ctypes.data},
    ):
        with pytest.raises(capi.NativeError):
            call(**wrong)


@pytest.mark.parametrize("leading", [(5,), (2, 3), (0,), (2, 0), (1, 40)], ids=str)
def test_torchs_ops_are_their_definitions(leading: tuple[int, ...]) -> None:
    site = Site(max(int(np.prod(leading)), 1), 70, 33, activation=0, seed=8)
    rows = int(np.prod(leading))
    x = site.x[:rows].reshape(*leading, 70)
    residual = site.residual[:rows].reshape(*leading, 33)
    codes: tuple[Any, Any, Any] = OPS.quantize_rows(x)
    for mine, torchs in zip(codes, quantize_rows(x), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0, atol=0, equal_nan=True)
    first: Any = (site.weights[0], site.scales[0], site.biases[0])
    second: Any = (site.weights[1], site.scales[1], None)
    want = DEFINED.linear_rows(*codes, *first)
    torch.testing.assert_close(
        OPS.linear_rows(*codes, *first), want, rtol=0, atol=0, equal_nan=True
    )
    for activation in (None, "silu"):
        wanted = DEFINED.linear_rows_rows(*codes, *first, activation)
        assert_same_codes(OPS.linear_rows_rows(*codes, *first, activation), wanted, 1)
    wanted = DEFINED.gated_rows_rows(*codes, *first, *second, "silu")
    assert_same_codes(OPS.gated_rows_rows(*codes, *first, *second, "silu"), wanted, 1)
    for outputs in range(1, 8):
        for given in (residual, None):
            norm = (given, *site.norm, 1e-5, "layer", outputs)
            got, ideal = (
                OPS.linear_rows_norm(*codes, *first, *norm),
                DEFINED.linear_rows_norm(*codes, *first, *norm),
            )
            torch.testing.assert_close(got[0], ideal[0], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(got[1], ideal[1], rtol=1e-4, atol=1e-4, equal_nan=True)
            assert_same_codes(got[2:], ideal[2:], 1)
        plain = (x, None, None, 1e-5, "rms", outputs)
        got, ideal = OPS.norm_rows(x, *plain), DEFINED.norm_rows(x, *plain)
        torch.testing.assert_close(got[1], ideal[1], rtol=1e-4, atol=1e-4, equal_nan=True)
        assert_same_codes(got[2:], ideal[2:], 1)


def test_products_see_weights_that_were_written_to() -> None:
    site = Site(3, 64, 32, activation=0, seed=4)
    operands: Any = [site.weights[0].clone(), site.scales[0].clone(), site.biases[0].clone()]
    for change in (
        lambda: operands[0].neg_(),
        lambda: operands[1].mul_(2),
        lambda: operands[2].zero_(),
    ):
        OPS.linear_rows(*site.codes, *operands)
        change()
        want = DEFINED.linear_rows(*site.codes, *operands)
        got = OPS.linear_rows(*site.codes, *operands)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_zero_points_that_no_code_can_have_are_refused() -> None:
    codes, scale, zero_point = quantize_rows(torch.randn(2, 64))
    weights = (torch.ones(8, 64, dtype=torch.int8), torch.ones(8))
    for wrong in (-1, 256):
        zero_point[1] = wrong
        with pytest.raises(ValueError, match="zero point"):
            OPS.linear_rows(codes, scale, zero_point, *weights)
