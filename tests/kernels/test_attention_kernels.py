"""Native attention, to rows and to codes of a cache, against its definition in plain torch."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import x86quant
from tests.isa import coded_keys, in_bfloat16
from tests.kernels.row_calls import LEVELS, OPS, assert_same_codes, at_page_end, lib
from tests.native import capi
from tests.native.levels import CPU_FLAGS, ISAS
from x86quant.ops.attention import attention, newest_sees
from x86quant.ops.cache_codes import cache_codes, from_cache_codes
from x86quant.ops.rows import quantize_rows

__all__ = ["lib"]


def attend(
    lib: capi.Library,
    isa: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float = 0.2,
    threads: int = 1,
    starts: Any = None,
    past: int = 0,
    hidden: Any = None,
) -> torch.Tensor:
    """Attention of [B, S, H, D] by the native kernel, on guarded memory.

    With ``starts`` there is one batch, of the rows of several sentences.
    """
    kept = [at_page_end(part.contiguous().numpy()) for part in (q, k, v)]
    out = at_page_end(np.full(q.shape, 7, np.float32))
    op = capi.Attention(
        capi.ISAS[isa],
        *(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]),
        *(part.ctypes.data for part in kept),
        causal=causal,
        scale=scale,
        threads=threads,
        out=out.ctypes.data,
        past=past,
        hidden=None if hidden is None else hidden.ctypes.data,
    )
    for name, part in zip("qkv", kept, strict=True):
        setattr(op, f"{name}_stride", (ctypes.c_int64 * 3)(*(s // 4 for s in part.strides[:3])))
    if mask is not None:
        held = at_page_end(mask.contiguous().numpy())
        op.mask, op.mask_is_bool = held.ctypes.data, mask.dtype == torch.bool
        steps = zip(held.strides[:3], held.shape[:3], strict=True)
        step = (ctypes.c_int64 * 3)(*(s // held.itemsize if n > 1 else 0 for s, n in steps))
        op.mask_stride = step
    if starts is not None:
        op.batch, op.starts = len(starts) - 1, starts.ctypes.data
        for name in ("q_stride", "k_stride", "v_stride", "mask_stride"):
            getattr(op, name)[0] = 1 << 40  # which must not count
    lib.attention(op)
    return torch.from_numpy(out.copy())


def heads(
    batch: int, queries: int, keys: int, heads: int, kv: int, size: int
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(queries)
    shapes = ((queries, heads), (keys, kv), (keys, kv))
    return [torch.randn(batch, *shape, size, generator=draw) for shape in shapes]


def assert_attends(isa: str, got: torch.Tensor, want: torch.Tensor, v: torch.Tensor) -> None:
    # Of bfloat16, products have 8 bits; codes are what test_attention_by_codes.py looks at.
    bound = 2**-7 if in_bfloat16(isa) else 2**-18
    if (from_keys := coded_keys(isa)) and v.shape[1] >= from_keys and got.shape[1] >= 32:
        bound = 2**-6
    error = (got - want).abs().nan_to_num(0)
    assert torch.equal(got.isnan(), want.isnan())
    assert error.max() <= bound * v.nan_to_num(0).abs().max(), error.max()


ATTENTIONS = [
    (1, 1, 1, 1, 1, 1),
    (2, 5, 7, 4, 2, 8),
    (1, 33, 40, 2, 1, 33),
    (1, 70, 300, 2, 2, 64),
    (2, 17, 513, 1, 1, 32),
    (1, 128, 128, 3, 3, 80),
]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("shape", ATTENTIONS, ids=str)
def test_attention_is_what_torch_defines(
    lib: capi.Library, isa: str, shape: tuple[int, int, int, int, int, int]
) -> None:
    q, k, v = heads(*shape)
    batch, queries, keys, n, *_ = shape
    draw = torch.Generator().manual_seed(0)
    seen = torch.rand(batch, n, queries, keys, generator=draw) < 0.6
    seen[:, :, 0] = False
    added = torch.randn(1, 1, queries, keys, generator=draw)
    added[..., -1, :] = -torch.inf
    least = torch.finfo(torch.float32).min
    padding = torch.zeros(batch, 1, 1, keys).masked_fill(seen[:, :1, -1:], least)
    # Padding behind the first tokens, of another number in each image and head; none at all in one.
    first = torch.arange(keys) < torch.randint(0, keys + 1, (batch, n, 1, 1), generator=draw)
    alike = (torch.arange(keys) < max(keys - 3, 0)).expand(1, 1, 1, keys)
    for mask in (None, seen, seen[:, :1], seen[:, :, -1:], added, padding, first, alike):
        for causal in (False, True):
            want = attention(q, k, v, mask, causal, 0.2)
            got = attend(lib, isa, q, k, v, mask, causal)
            assert_attends(isa, got, want, v)
            assert torch.equal(got, attend(lib, isa, q, k, v, mask, causal, threads=16))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("causal", [False, True])
def test_sentences_side_by_side_are_attended_each_by_itself(
    lib: capi.Library, isa: str, causal: bool
) -> None:
    """The bytes of a call for each, on memory that ends behind the last row."""
    starts = np.array([0, 3, 3, 73, 74, 100], np.int64)
    q, k, v = heads(1, 100, 100, 4, 2, 24)
    seen = torch.rand(1, 1, 1, 100, generator=torch.Generator().manual_seed(3)) < 0.8
    for mask in (None, seen):
        want = []
        for a, b in itertools.pairwise(starts):
            mine = [x[:, a:b] for x in (q, k, v)]
            hidden = None if mask is None else mask[..., a:b]
            if a < b:
                want.append(attend(lib, isa, mine[0], mine[1], mine[2], hidden, causal))
        for threads in (1, 16):
            got = attend(lib, isa, q, k, v, mask, causal, threads=threads, starts=starts)
            assert torch.equal(got, torch.cat(want, 1))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("queries", "past"), [(1, 0), (5, 0), (40, 3), (2, 300), (70, 530)], ids=str
)
def test_attention_behind_a_past_of_which_some_is_hidden(
    lib: capi.Library, isa: str, queries: int, past: int
) -> None:
    """Padding in front, up to the last key but one: queries that are padding themselves give 0."""
    keys = past + queries
    q, k, v = heads(4, queries, keys, 4, 2, 24)
    hidden = np.array([0, keys - 1, past // 2, min(past + 1, keys - 1)], np.int64)
    sees = newest_sees(torch.from_numpy(hidden), q, k)
    for held, mask in (
        (None, newest_sees(torch.zeros(4, dtype=torch.int64), q, k)),
        (hidden, sees),
    ):
        want = attention(q, k, v, mask, False, 0.2)
        got = attend(lib, isa, q, k, v, causal=True, past=past, hidden=held)
        assert_attends(isa, got, want, v)
        again = attend(lib, isa, q, k, v, causal=True, past=past, hidden=held, threads=16)
        assert torch.equal(got, again)


@pytest.mark.parametrize("isa", LEVELS)
def test_attention_to_nothing_and_of_nothing(lib: capi.Library, isa: str) -> None:
    q, k, v = heads(2, 3, 0, 2, 1, 16)
    assert torch.equal(attend(lib, isa, q, k, v), torch.zeros_like(q))
    for shape in ((0, 3, 4, 2, 1, 16), (2, 0, 4, 2, 1, 16)):
        q, k, v = heads(*shape)
        assert attend(lib, isa, q, k, v).shape == q.shape


@pytest.mark.parametrize("isa", LEVELS)
def test_attention_keeps_what_is_no_number(lib: capi.Library, isa: str) -> None:
    q, k, v = heads(1, 40, 50, 2, 2, 32)
    q[0, 3, 0, 5] = torch.nan
    k[0, 7, 1, 0] = torch.inf
    v[0, 9, 0, 4] = torch.nan
    q[0, 5] *= 300  # one key takes all
    want = attention(q, k, v, None, False, 0.2)
    got = attend(lib, isa, q, k, v)
    assert torch.equal(got.isnan(), want.isnan())
    if not in_bfloat16(isa):  # rounding decides there which key that is
        assert_attends(isa, got, want, v)


@pytest.mark.parametrize("isa", ISAS)
def test_attention_is_in_bfloat16_where_the_cpu_has_it(isa: str) -> None:
    """But for Intel's dot products of pairs, which take longer than products of floats."""
    has = "avx512_bf16" in CPU_FLAGS
    pairs = isa == "avx512_vnni" and x86quant.cpu().vendor != "GenuineIntel"
    assert in_bfloat16(isa) == (has and (pairs or isa == "amx_int8"))


def test_attentions_that_do_not_fit_are_refused(lib: capi.Library) -> None:
    q, k, v = heads(1, 4, 4, 4, 3, 16)
    with pytest.raises(capi.NativeError):
        attend(lib, ISAS[-1], q, k, v)
    q, k, v = heads(1, 4, 4, 4, 2, 16)
    with pytest.raises(capi.NativeError):
        attend(lib, ISAS[-1], q, k, v, scale=float("inf"))
    with pytest.raises(capi.NativeError):
        attend(lib, ISAS[-1], q, k, v, threads=0)
    with pytest.raises(capi.NativeError):
        attend(lib, ISAS[-1], q, k, v, causal=True, past=-1)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(capi.NativeError):  # one says all that the other does
        attend(lib, ISAS[-1], q, k, v, mask, hidden=np.zeros(1, np.int64))


def test_attention_reads_slices_of_one_product_and_broadcast_masks() -> None:
    draw = torch.Generator().manual_seed(6)
    qkv = torch.randn(2, 45, 3, 4, 32, generator=draw)
    q, k, v = qkv.unbind(2)
    bound = 2**-7 * v.abs().max()
    padding = torch.rand(2, 1, 1, 45, generator=draw) < 0.7
    added = torch.randn(45, 45, generator=draw)
    masks = [None, padding, padding.expand(2, 4, 45, 45), added[None, None], added.t()[None, None]]
    for mask in masks:
        want = attention(q, k, v, mask, False, 0.2)
        got = OPS.attention(q, k, v, mask, False, 0.2)
        assert (got - want).abs().max() <= bound
        codes = OPS.attention_rows(q, k, v, mask, False, 0.2)
        assert_same_codes(codes, quantize_rows(got.flatten(2)))
    turned = [part.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2) for part in (q, k, v)]
    assert torch.equal(
        OPS.attention(*turned, None, True, 0.2), OPS.attention(q, k, v, None, True, 0.2)
    )


#: Batch, keys, heads, heads of keys, size.
ONE_QUERY = [
    (1, 1, 2, 2, 8), (2, 7, 4, 2, 20), (1, 33, 12, 12, 64), (2, 70, 6, 1, 80), (1, 131, 3, 3, 129)
]  # fmt: skip


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("shape", ONE_QUERY, ids=str)
def test_one_query_sees_all_keys(
    lib: capi.Library, isa: str, shape: tuple[int, int, int, int, int]
) -> None:
    batch, keys, n, kv, size = shape
    draw = torch.Generator().manual_seed(keys)
    q = torch.randn(batch, 1, n, size, generator=draw)
    held = [torch.randn(batch, kv, keys, size, generator=draw) for _ in range(2)]
    keys_of, values_of = (x.transpose(1, 2) for x in held)
    hidden = np.array([0, keys // 2, keys - 1], np.int64)[-batch:].copy()
    sees = newest_sees(torch.from_numpy(hidden), q, keys_of)
    wants = [attention(q, keys_of, values_of, mask, False, 0.2) for mask in (None, sees)]
    # What lies behind the last of each is not there.
    k, v, at_q = (at_page_end(x.numpy()) for x in (*held, q))
    out = at_page_end(np.full((batch, n, size), np.nan, np.float32))
    op = capi.OneQuery(capi.ISAS[isa], batch, keys, n, kv, size)
    op.q, op.k, op.v, op.out = (x.ctypes.data for x in (at_q, k, v, out))
    op.q_stride = (ctypes.c_int64 * 2)(n * size, size)
    strides = (ctypes.c_int64 * 3)(kv * keys * size, keys * size, size)
    op.k_stride = op.v_stride = strides
    op.scale = 0.2
    for want, given in zip(wants, (None, hidden.ctypes.data), strict=True):
        op.hidden = given
        lib.one_query(op)
        torch.testing.assert_close(torch.from_numpy(out.copy()), want[:, 0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("field", "value"), [("keys", 0), ("kv_heads", 3), ("size", -1), ("isa", 99)]
)
def test_one_queries_that_do_not_fit_are_refused(lib: capi.Library, field: str, value: int) -> None:
    op = capi.OneQuery(capi.ISAS["avx2"], 1, 4, 2, 2, 8)
    op.q = op.k = op.v = op.out = 64
    setattr(op, field, value)
    with pytest.raises(capi.NativeError):
        lib.one_query(op)


def rows_of_a_cache(size: int) -> torch.Tensor:
    """Rows of every magnitude, and some whose products fall on the middle between two codes."""
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(60, size, generator=draw) * 10.0 ** torch.arange(-43, 17)[:, None]
    x[0] = 0
    x[1] = -0.0
    x[2:6] = torch.randint(-254, 255, (4, size), generator=draw) / 2
    x[2:6, 0] = 127
    x[6, -1] = torch.nan
    x[7, 0] = -torch.inf
    x[8, 0] = 3e38
    return x


@pytest.mark.parametrize("isa", LEVELS)
def test_codes_of_many_rows_are_rounded_alike(lib: capi.Library, isa: str) -> None:
    """Three of these codes tell a quotient from a product with a reciprocal."""
    rows = torch.randn(30000, 64, generator=torch.Generator().manual_seed(4))
    wanted, scales = cache_codes(rows)
    codes, found = np.zeros((30000, 64), np.int8), np.zeros((30000, 1), np.float32)
    for x, of_row, scale in zip(rows.numpy(), codes, found, strict=True):
        lib.cache_codes(isa, x, of_row, scale)
    assert np.array_equal(codes, wanted.numpy())
    assert np.array_equal(found[:, 0], scales.numpy())


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("size", [1, 7, 16, 32, 33, 64, 80, 129])
def test_codes_of_a_cache_are_the_same_everywhere(lib: capi.Library, isa: str, size: int) -> None:
    rows = rows_of_a_cache(size)
    wanted, scales = cache_codes(rows)
    assert int(wanted.abs().max()) <= 127
    for row, want, scale in zip(rows, wanted, scales, strict=True):
        x = at_page_end(row.numpy())
        codes = at_page_end(np.full(size, 99, np.int8))
        found = at_page_end(np.zeros(1, np.float32))
        lib.cache_codes(isa, x, codes, found)
        assert codes.tolist() == want.tolist()
        assert found.tobytes() == scale.numpy().tobytes()
        if scale.isfinite():
            error = (from_cache_codes(want, scale).double() - row.double()).abs().max()
            assert error <= 0.5001 * float(scale)


#: Batch, queries, keys before them, heads, heads of keys, size.
CODED = [
    (1, 1, 0, 2, 2, 8), (2, 1, 6, 4, 2, 20), (1, 1, 32, 12, 12, 64), (2, 1, 69, 7, 1, 80),
    (1, 1, 130, 9, 3, 129), (2, 3, 20, 6, 2, 64), (1, 8, 60, 5, 1, 16), (2, 9, 60, 4, 2, 33),
    (1, 40, 0, 2, 1, 64), (1, 70, 300, 2, 2, 32),
]  # fmt: skip


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("shape", CODED, ids=str)
def test_attention_to_codes_is_that_to_their_floats(
    lib: capi.Library, isa: str, shape: tuple[int, int, int, int, int, int]
) -> None:
    batch, queries, past, n, kv, size = shape
    keys = past + queries
    draw = torch.Generator().manual_seed(keys)
    q = torch.randn(batch, queries, n, size, generator=draw)
    held = [cache_codes(torch.randn(batch, kv, keys, size, generator=draw)) for _ in range(2)]
    keys_of, values_of = (from_cache_codes(*x).transpose(1, 2) for x in held)
    hidden = np.array([0, past // 2], np.int64)[-batch:].copy()
    out = at_page_end(np.full((batch, queries, n, size), np.nan, np.float32))
    kept = [at_page_end(x.numpy()) for pair in zip(*held, strict=True) for x in pair]
    at_q = at_page_end(q.numpy())
    op = capi.Attention(capi.ISAS[isa], batch, queries, keys, n, kv, size)
    op.q, op.out = at_q.ctypes.data, out.ctypes.data
    op.k_codes, op.v_codes, op.k_scale, op.v_scale = (x.ctypes.data for x in kept)
    op.q_stride = (ctypes.c_int64 * 3)(queries * n * size, n * size, size)
    op.k_stride = op.v_stride = (ctypes.c_int64 * 3)(kv * keys * size, size, keys * size)
    op.k_scale_stride = op.v_scale_stride = (ctypes.c_int64 * 2)(kv * keys, keys)
    op.scale, op.causal, op.past, op.threads = 0.2, 1, past, 2
    step = 0.03 if queries > 8 and in_bfloat16(isa) else 1e-4
    for number in (None, hidden.ctypes.data):
        nobody = torch.from_numpy(hidden) * (number is not None)
        sees = newest_sees(nobody, q, keys_of)
        want = attention(q, keys_of, values_of, sees, False, 0.2)
        op.hidden = number
        lib.attention(op)
        torch.testing.assert_close(torch.from_numpy(out.copy()), want, rtol=step, atol=step)


@pytest.mark.parametrize("isa", LEVELS)
def test_what_is_not_finite_in_a_cache_shows(lib: capi.Library, isa: str) -> None:
    """A code of 0 with a scale of NaN must not become a share of nothing."""
    held = cache_codes(torch.randn(1, 1, 9, 16))
    for part, shown in (("k_scale", True), ("v_scale", True), (None, False)):
        parts = {name: x.clone() for name, x in zip(("k_codes", "k_scale"), held, strict=True)}
        parts |= {"v_codes": held[0].clone(), "v_scale": held[1].clone()}
        if part:
            parts[part][0, 0, 4] = torch.nan
        q, out = np.ones((1, 1, 1, 16), np.float32), np.zeros((1, 1, 1, 16), np.float32)
        op = capi.Attention(capi.ISAS[isa], 1, 1, 9, 1, 1, 16)
        op.q, op.out = q.ctypes.data, out.ctypes.data
        for name, x in parts.items():
            setattr(op, name, x.data_ptr())
        op.k_stride = op.v_stride = (ctypes.c_int64 * 3)(144, 16, 144)
        op.k_scale_stride = op.v_scale_stride = (ctypes.c_int64 * 2)(9, 9)
        op.scale, op.causal, op.past, op.threads = 0.2, 1, 8, 1
        lib.attention(op)
        assert np.isnan(out).all() == shown


@pytest.mark.parametrize("wrong", ["mask", "starts", "causal", "k", "k_codes", "v_scale"])
def test_codes_with_what_they_do_not_go_with_are_refused(lib: capi.Library, wrong: str) -> None:
    op = capi.Attention(capi.ISAS["avx2"], 1, 1, 4, 2, 2, 8)
    op.q = op.out = op.k_codes = op.v_codes = op.k_scale = op.v_scale = 64
    op.causal, op.past, op.threads = 1, 3, 1
    at = ctypes.byref(op)
    assert lib.lib.xq_attention_check(at) == 0
    setattr(op, wrong, 64 if not getattr(op, wrong) else 0 if wrong == "causal" else None)
    with pytest.raises(capi.NativeError):
        lib.attention(op)
