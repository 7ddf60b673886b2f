"""Lookups, interactions and gates: against plain loops byte by byte, and those against torch."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.native import capi
from tests.native.capi_floats import (
    FaultError,
    Table,
    gru_gates,
    interact,
    look_up,
    lstm_gates,
)
from tests.native.levels import ISAS
from x86quant import extension

FORMATS = [(8, False), (8, True), (4, True), (4, False), (2, True)]
QUANTIZED = torch.ops.quantized


@pytest.fixture(scope="module")
def lib() -> capi.Library:
    return capi.Library(Path(extension.__file__).with_name("_C.so"))  # what ships


def prepacked(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The stock operator's rows."""
    name = {8: "byte", 4: "4bit", 2: "2bit"}[bits]
    found: torch.Tensor = getattr(QUANTIZED, f"embedding_bag_{name}_prepack")(weight)
    return found


def table_of(weight: torch.Tensor, bits: int, half: bool, front: bool = False) -> Table:
    """Rows as FBGEMM makes them; what it has no operator for is put together from what it has."""
    importlib.import_module("fbgemm_gpu")  # registers torch.ops.fbgemm

    dim = weight.shape[1]
    code_bytes = dim * bits // 8
    if bits == 8 and half:
        rows = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weight, 8).numpy()
    else:
        rows = prepacked(weight, bits).numpy()
    codes, scales = rows[:, :code_bytes], rows[:, code_bytes:]
    if bits != 8 and not half:
        halves = np.ascontiguousarray(scales).view(np.float16).astype(np.float32)
        scales = halves.view(np.uint8)
    rows = np.concatenate([scales, codes] if front else [codes, scales], 1)
    return Table(np.ascontiguousarray(rows), dim, bits, half, front)


def floats_of(table: Table) -> np.ndarray[Any, Any]:
    """What the rows stand for, in float32."""
    width = 4 if table.half else 8
    at = 0 if table.front else table.code_bytes
    codes = table.rows[:, width:] if table.front else table.rows[:, : table.code_bytes]
    scales = np.ascontiguousarray(table.rows[:, at : at + width])
    scale, bias = scales.view(np.float16 if table.half else np.float32).astype(np.float32).T
    shifts = np.arange(0, 8, table.bits, dtype=np.uint8)
    found = (codes[:, :, None] >> shifts & ((1 << table.bits) - 1)).reshape(len(codes), -1)
    return found[:, : table.dim] * scale[:, None] + bias[:, None]


def bags(rng: np.random.Generator, rows: int, count: int, dtype: Any) -> tuple[Any, Any]:
    """Random indices, and where bags of 0 to 5 of them start, with the end."""
    starts = np.cumsum([0, *rng.integers(0, 6, count)]).astype(dtype)
    return rng.integers(0, rows, starts[-1]).astype(dtype), starts


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize(("bits", "half"), FORMATS)
def test_lookups(lib: capi.Library, isa: str, bits: int, half: bool, front: bool) -> None:
    rng = np.random.default_rng(bits + 10 * half)
    for dim in (4, 16, 20, 64, 92, 128, 260):
        weight = torch.from_numpy(rng.normal(0, 1, (50, dim)).astype(np.float32))
        table = table_of(weight, bits, half, front)
        values = torch.from_numpy(floats_of(table))
        for dtype, mode in ((np.int32, "sum"), (np.int64, "mean"), (np.int64, "max")):
            indices, starts = bags(rng, 50, 23, dtype)
            # Negative ones too: the largest of a bag must not start from 0.
            weights = rng.normal(0, 1, len(indices)).astype(np.float32) if mode == "sum" else None
            for last, padding in ((True, -1), (False, 7)):
                offsets = starts if last else starts[:-1].copy()
                options: Any = {"mode": mode, "padding": padding, "last_offset": last}
                got = look_up(lib, isa, table, indices, offsets, weights=weights, **options)
                same = look_up(
                    lib, "reference", table, indices, offsets, weights=weights, parts=3, **options
                )
                assert np.array_equal(got, same)
                want = F.embedding_bag(
                    torch.from_numpy(indices).long(), values, torch.from_numpy(starts).long(),
                    mode=mode, include_last_offset=True,
                    padding_idx=None if padding < 0 else padding,
                    per_sample_weights=None if weights is None else torch.from_numpy(weights),
                )  # fmt: skip
                assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_large_tables(lib: capi.Library, isa: str, mode: str) -> None:
    """Those of which rows are fetched ahead, and bags are not looked up two by two."""
    rng = np.random.default_rng(0)
    for bits, dim in ((8, 20), (8, 64), (4, 64), (8, 260), (2, 128)):
        rows = (1 << 20) // dim * 8 // bits
        table = table_of(torch.randn(rows, dim), bits, bits != 8)
        for count in (1, 2, 31):
            indices, starts = bags(rng, rows, count, np.int64)
            options: Any = {"mode": mode, "last_offset": True}
            got = look_up(lib, isa, table, indices, starts, **options)
            assert np.array_equal(got, look_up(lib, "reference", table, indices, starts, **options))


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_rows_of_floats(lib: capi.Library, isa: str) -> None:
    rng = np.random.default_rng(0)
    for dim in (1, 5, 16, 30, 64, 140):
        weight = rng.normal(0, 1, (50, dim)).astype(np.float32)
        table = Table(weight.view(np.uint8), dim, 32, False)
        for mode in ("sum", "mean", "max"):
            indices, starts = bags(rng, 50, 23, np.int64)
            options: Any = {"mode": mode, "padding": 7, "last_offset": True}
            got = look_up(lib, isa, table, indices, starts, **options)
            same = look_up(lib, "reference", table, indices, starts, parts=3, **options)
            assert np.array_equal(got, same)
            want = F.embedding_bag(
                torch.from_numpy(indices), torch.from_numpy(weight), torch.from_numpy(starts),
                mode=mode, include_last_offset=True, padding_idx=7,
            )  # fmt: skip
            assert np.allclose(got, want, rtol=1e-6, atol=1e-6)
        one = np.array([3, 49], np.int64)
        assert np.array_equal(look_up(lib, isa, table, one, None, each=1), weight[one])
        infinite = np.full(2, np.inf, np.float32)
        got = look_up(lib, isa, table, one, None, each=1, weights=infinite)
        assert np.array_equal(got, weight[one] * infinite[:, None])


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_lookups_without_offsets(lib: capi.Library, isa: str) -> None:
    rng = np.random.default_rng(0)
    table = table_of(torch.randn(30, 24), 4, True)
    values = floats_of(table)
    indices = rng.integers(0, 30, 60)
    assert np.allclose(look_up(lib, isa, table, indices, None, each=1), values[indices], atol=1e-6)
    want = values[indices].reshape(20, 3, 24).sum(1)
    assert np.allclose(look_up(lib, isa, table, indices, None, each=3), want, atol=1e-5)
    assert look_up(lib, isa, table, indices[:0], None, each=4).shape == (0, 24)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_sums_are_those_of_the_stock_operators(lib: capi.Library, bits: int) -> None:
    # The same rows, and nearly the same order of operations; FBGEMM's own varies with the CPU.
    weight, rng = torch.randn(40, 32), np.random.default_rng(1)
    name = {8: "byte", 4: "4bit", 2: "2bit"}[bits]
    rows = prepacked(weight, bits)
    table = table_of(weight, bits, bits != 8)
    assert np.array_equal(rows.numpy(), table.rows)
    gpu = torch.ops.fbgemm  # its table-batched operators take these
    if bits == 8:
        assert torch.equal(gpu.FloatToFused8BitRowwiseQuantized(weight), rows)
    else:
        assert torch.equal(gpu.FloatToFusedNBitRowwiseQuantizedSBHalf(weight, bits), rows)
    indices, starts = bags(rng, 40, 17, np.int64)
    stock = getattr(QUANTIZED, f"embedding_bag_{name}_rowwise_offsets")(
        rows, torch.from_numpy(indices), torch.from_numpy(starts), include_last_offset=True
    )
    got = look_up(lib, ISAS[0], table, indices, starts, last_offset=True)
    assert np.allclose(got, stock, rtol=1e-6, atol=1e-6)


BAD: dict[str, tuple[list[int], list[int]]] = {
    "index 2 40": ([0, 1, 40], [0, 2, 3]),
    "index 0 -1": ([-1, 1, 4], [0, 2, 3]),
    "first 0 1": ([0, 1, 2], [1, 2, 3]),
    "offset 2 1": ([0, 1, 2], [0, 2, 1, 3]),
    "offset 1 4": ([0, 1, 2], [0, 4, 3]),
    "offset 1 -5": ([0, 1, 2], [0, -5, 3]),
    "last 2 2": ([0, 1, 2], [0, 1, 2]),
}


@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("fault", "call"), BAD.items())
def test_bad_indices_are_found_first(
    lib: capi.Library, isa: str, dtype: Any, fault: str, call: Any
) -> None:
    table = table_of(torch.randn(40, 8), 8, False)
    indices, offsets = (np.array(values, dtype) for values in call)
    for parts in (1, 3):
        with pytest.raises(FaultError) as found:
            look_up(lib, isa, table, indices, offsets, last_offset=True, parts=parts)
        if parts == 1:
            assert str(found.value) == fault


def test_the_largest_index_is_not_beyond_every_table(lib: capi.Library) -> None:
    table = table_of(torch.randn(4, 8), 8, False)
    for dtype in (np.int32, np.int64):
        for index in (np.iinfo(dtype).max, np.iinfo(dtype).min, 4):
            with pytest.raises(FaultError, match=f"index 0 {index}"):
                look_up(lib, ISAS[0], table, np.array([index], dtype), None, each=1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("bits", "half"), FORMATS)
def test_nothing_behind_a_table_is_read(lib: capi.Library, isa: str, bits: int, half: bool) -> None:
    for dim in (4, 12, 20, 44, 76):
        table = table_of(torch.randn(3, dim), bits, half, front=True)  # codes end the row
        page = mmap.PAGESIZE
        with mmap.mmap(-1, 2 * page) as memory:
            # The last page may not be read.
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            libc = ctypes.CDLL(None)
            assert libc.mprotect(ctypes.c_void_p(address + page), page, 0) == 0
            flat = np.frombuffer(memory, np.uint8, page)[page - table.rows.size :]
            flat[:] = table.rows.reshape(-1)
            edge = Table(flat.reshape(table.rows.shape), dim, bits, half, True)
            indices = np.array([2, 0, 2], np.int64)
            got = look_up(lib, isa, edge, indices, None, each=1)
            assert np.array_equal(got, look_up(lib, "reference", table, indices, None, each=1))
            assert libc.mprotect(ctypes.c_void_p(address + page), page, 3) == 0
            del flat, edge


def test_descriptions_that_make_no_sense_are_refused(lib: capi.Library) -> None:
    table, one = table_of(torch.randn(4, 8), 8, False), np.array([0], np.int64)
    short = Table(np.ascontiguousarray(table.rows[:, :-1]), 8, 8, False)
    with pytest.raises(capi.NativeError):
        look_up(lib, ISAS[0], short, one, None, each=1)
    with pytest.raises(capi.NativeError):
        look_up(lib, ISAS[0], Table(table.rows, 8, 5, False), one, None, each=1)
    weights = np.ones(1, np.float32)
    with pytest.raises(capi.NativeError):
        look_up(lib, ISAS[0], table, one, None, each=1, mode="mean", weights=weights)


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_interactions(lib: capi.Library, isa: str) -> None:
    for samples, count, dim in ((5, 26, 64), (1, 1, 16), (3, 9, 20), (2, 0, 8), (4, 13, 3)):
        first, vectors = torch.randn(samples, dim), torch.randn(samples, count, dim)
        every = torch.cat([first[:, None], vectors], 1).double()
        rows, columns = torch.tril_indices(count + 1, count + 1, -1)
        products = (every @ every.transpose(1, 2))[:, rows, columns]
        want = torch.cat([first, products.float()], 1)
        got = interact(lib, isa, first.numpy(), vectors.numpy())
        assert np.allclose(got, want, atol=1e-4)
        assert np.array_equal(got, interact(lib, "reference", first.numpy(), vectors.numpy()))
        more = interact(lib, isa, first.numpy(), vectors.numpy(), squares=True)
        assert np.array_equal(more[:, : got.shape[1]], got)
        assert np.allclose(more[:, got.shape[1] :], every.square().sum(2), atol=1e-4)
        plain = interact(lib, "reference", first.numpy(), vectors.numpy(), squares=True)
        assert np.array_equal(more, plain)


# Of a sigmoid or tanh alone; what they are multiplied with is at most 1.
ERROR = 6e-7


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_gates(lib: capi.Library, isa: str) -> None:
    torch.manual_seed(0)
    for units in (1, 7, 16, 45):
        n = 40
        own, hidden = torch.randn(2, n, 4 * units) * torch.tensor([4.0, 2.0])[:, None, None]
        own[0] *= 1e3  # saturated
        c = torch.randn(n, units)
        h, cell = lstm_gates(lib, isa, own.numpy(), hidden.numpy(), c.numpy())
        i, f, g, o = (own + hidden).double().chunk(4, 1)
        want = torch.sigmoid(f) * c.double() + torch.sigmoid(i) * torch.tanh(g)
        assert np.abs(cell - want.numpy()).max() < 2 * ERROR * (1 + c.abs().max())
        assert np.abs(h - (torch.sigmoid(o) * torch.tanh(want)).numpy()).max() < 5 * ERROR
        own, hidden = own[:, : 3 * units].contiguous(), hidden[:, : 3 * units].contiguous()
        h = gru_gates(lib, isa, own.numpy(), hidden.numpy(), c.numpy())
        (r, z, n1), (hr, hz, hn) = (x.double().chunk(3, 1) for x in (own, hidden))
        fresh = torch.tanh(n1 + torch.sigmoid(r + hr) * hn)
        update = torch.sigmoid(z + hz)
        want = (1 - update) * fresh + update * c.double()
        assert np.abs(h - want.numpy()).max() < 10 * ERROR * (1 + c.abs().max())


def test_gates_are_the_same_at_every_level(lib: capi.Library) -> None:
    torch.manual_seed(0)
    own, hidden, c = torch.randn(40, 180) * 3, torch.randn(40, 180), torch.randn(40, 45)
    found = []
    for isa in ISAS:
        h, cell = lstm_gates(lib, isa, own.numpy(), hidden.numpy(), c.numpy())
        gru = gru_gates(
            lib,
            isa,
            own[:, :135].contiguous().numpy(),
            hidden[:, :135].contiguous().numpy(),
            c.numpy(),
        )
        found.append(b"".join(x.tobytes() for x in (h, cell, gru)))
    assert len(set(found)) == 1


@pytest.mark.parametrize("isa", ISAS)
def test_the_error_of_sigmoid_and_tanh(lib: capi.Library, isa: str) -> None:
    # With the other gates saturated, c is the tanh of one gate, or a sigmoid times 1.
    x = torch.cat([torch.linspace(-12, 12, 40001), torch.tensor([-1e30, 1e30, 0.0])])
    big = torch.full_like(x, 50)
    zero = torch.zeros(len(x), 4)
    own = torch.stack([big, -big, x, big], 1)
    _, c = lstm_gates(lib, isa, own.numpy(), zero.numpy(), torch.ones(len(x), 1).numpy())
    assert np.abs(c[:, 0] - torch.tanh(x.double()).numpy()).max() < ERROR
    own = torch.stack([-big, x, big, big], 1)
    _, c = lstm_gates(lib, isa, own.numpy(), zero.numpy(), torch.ones(len(x), 1).numpy())
    assert np.abs(c[:, 0] - torch.sigmoid(x.double()).numpy()).max() < ERROR
    own[:] = torch.nan
    h, _ = lstm_gates(lib, isa, own.numpy(), zero.numpy(), torch.ones(len(x), 1).numpy())
    assert np.isnan(h).all()
