"""Attention to many keys, whose products are of codes, against its definition in plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.isa import coded_keys, in_bfloat16
from tests.kernels.row_calls import LEVELS, lib
from tests.kernels.test_attention_kernels import attend, heads
from tests.native import capi
from tests.native.levels import ISAS
from x86quant.ops.attention import attention

__all__ = ["lib"]

_NONE = pytest.param("", marks=pytest.mark.skip(reason="no level multiplies codes on this CPU"))
at_levels_of_codes = pytest.mark.parametrize(
    "isa", [isa for isa in LEVELS if coded_keys(isa)] or [_NONE]
)
MANY = 300


def coded(x: torch.Tensor, most: int, dim: int) -> torch.Tensor:
    """What codes of ``most`` and a scale along ``dim`` keep of ``x``."""
    scale = (x.abs().amax(dim, keepdim=True) / most).clamp_min(2.0**-100)
    return (x / scale).round() * scale


def by_codes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float = 0.2,
) -> torch.Tensor:
    """Attention of codes: keys without their mean, a scale for each query, key and feature of v."""
    keys = coded(k - k.mean(1, keepdim=True), 127, 3)
    return attention(coded(q, 127, 3), keys, coded(v, 2047, 1), mask, causal, scale)


def difference(got: torch.Tensor, want: torch.Tensor, v: torch.Tensor) -> float:
    return float((got - want).abs().max() / v.abs().max())


@at_levels_of_codes
@pytest.mark.parametrize(
    "shape", [(1, 32, MANY, 1, 1, 64), (2, 70, 513, 4, 2, 33), (1, 45, 256, 2, 2, 80)], ids=str
)
def test_products_are_of_codes(
    lib: capi.Library, isa: str, shape: tuple[int, int, int, int, int, int]
) -> None:
    """A 16th of what codes cost is left for shares of 12 bits, and for codes at a border."""
    q, k, v = heads(*shape)
    keys = shape[2]
    draw = torch.Generator().manual_seed(0)
    seen = torch.rand(1, 1, shape[1], keys, generator=draw) < 0.6
    added = torch.randn(1, 1, shape[1], keys, generator=draw)
    for mask in (None, seen, added):
        for causal in (False, True):
            got = attend(lib, isa, q, k, v, mask, causal)
            exact = attention(q, k, v, mask, causal, 0.2)
            assert difference(got, by_codes(q, k, v, mask, causal), v) <= 2**-10
            assert 2**-10 < difference(got, exact, v) <= 2**-6
            assert torch.equal(got, attend(lib, isa, q, k, v, mask, causal, threads=16))


@at_levels_of_codes
def test_keys_behind_the_last_that_is_seen_count_in_nothing(lib: capi.Library, isa: str) -> None:
    q, k, v = heads(1, MANY, MANY + 70, 2, 2, 64)
    k[:, MANY:], v[:, MANY:] = 1e6, -1e6
    first = (torch.arange(MANY + 70) < MANY).expand(1, 1, 1, -1)
    got = attend(lib, isa, q, k, v, first)
    assert torch.equal(got, attend(lib, isa, q, k[:, :MANY], v[:, :MANY]))


@at_levels_of_codes
def test_what_all_keys_have_in_common_costs_no_precision(lib: capi.Library, isa: str) -> None:
    q, k, v = heads(1, 40, MANY, 2, 2, 64)
    common = 100 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    got, plain = attend(lib, isa, q, k + common, v), attend(lib, isa, q, k, v)
    assert difference(got, plain, v) <= 2**-9


@at_levels_of_codes
@pytest.mark.parametrize(
    "spoilt",
    [("q", torch.nan), ("k", torch.inf), ("v", torch.nan), ("v", 1e37), ("k", 1e25), ("k", 1e4)],
    ids=str,
)
def test_heads_that_codes_cannot_say_are_of_floats(
    lib: capi.Library, isa: str, spoilt: tuple[str, float]
) -> None:
    """As they are where few keys are, so that one head that is no number leaves the others be."""
    name, value = spoilt
    given = dict(zip("qkv", heads(1, 40, MANY, 2, 2, 64), strict=True))
    given[name][0, 3, 1, 5] = value
    got = attend(lib, isa, **given)
    want = attention(given["q"], given["k"], given["v"], None, False, 0.2)
    assert torch.equal(got.isnan(), want.isnan())
    assert difference(got[:, :, :1], want[:, :, :1], want[:, :, :1]) <= 2**-5
    there = ~want[:, :, 1].isnan()
    error = torch.where(there, (got[:, :, 1] - want[:, :, 1]).abs(), 0.0)
    assert error.max() <= 2**-7 * given["v"][:, :, 1].nan_to_num(0).abs().max()


@at_levels_of_codes
def test_equal_keys_and_empty_values(lib: capi.Library, isa: str) -> None:
    q, k, v = heads(1, 40, MANY, 1, 1, 64)
    got = attend(lib, isa, q, torch.zeros_like(k), v)
    assert difference(got, v.mean(1, keepdim=True).expand_as(got), v) <= 2**-10
    assert not attend(lib, isa, q, k, torch.zeros_like(v)).any()
    far = k.clone()
    far[:, 7] = 4000 * q[:, 3]  # one key takes all of one query, scores of others are huge too
    want = attention(q, far, v, None, False, 0.2)
    got = attend(lib, isa, q, far, v)
    assert torch.isfinite(got).all()
    assert difference(got[:, 3], want[:, 3], v) <= 2**-9


@pytest.mark.parametrize("isa", ISAS)
def test_few_keys_or_few_queries_are_of_no_codes(lib: capi.Library, isa: str) -> None:
    if isa not in LEVELS:
        pytest.skip(f"this CPU has no {isa}")
    bound = 2**-7 if in_bfloat16(isa) else 2**-18
    for shape in ((1, 31, MANY, 1, 1, 64), (1, 40, 255, 1, 1, 64)):
        q, k, v = heads(*shape)
        want = attention(q, k, v, None, False, 0.2)
        assert difference(attend(lib, isa, q, k, v), want, v) <= bound
    starts = np.array([0, 40, 40 + MANY], np.int64)
    q, k, v = heads(1, 40 + MANY, 40 + MANY, 1, 1, 64)
    got = attend(lib, isa, q, k, v, starts=starts)
    sentences = (slice(0, 40), slice(40, 40 + MANY))
    alone = [attend(lib, isa, q[:, part], k[:, part], v[:, part]) for part in sentences]
    assert torch.equal(got, torch.cat(alone, 1))
