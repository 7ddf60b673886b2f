"""Counting and rounding of many floats in one pass, against torch."""

from __future__ import annotations

import pytest
import torch

from x86quant import extension
from x86quant.observing.native_floats import counted, rounded

SIZES = [(), (1,), (7,), (3, 5, 4, 6), (1 << 18,), (0,)]


def _values(sizes: tuple[int, ...]) -> torch.Tensor:
    return 4 * torch.randn(sizes, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("exponent", [-6, 0, 3])
def test_counts(sizes: tuple[int, ...], exponent: int) -> None:
    x = _values(sizes)
    if x.numel() > 6:
        x.view(-1)[:7] = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-20, -(2.0**-20), 3.999])
    factor = 2.0**exponent
    numbers = torch.floor(x.double() * factor).long().flatten()
    start = int(numbers.min()) - 2 if x.numel() else -5
    bins = int(numbers.max()) - start + 4 if x.numel() else 9
    found = counted(x, factor, start, bins)
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.bincount(numbers - start, minlength=bins))
    assert torch.equal(counted(x.double(), factor, start, bins), found)


def test_counts_lie_in_any_order() -> None:
    x = _values((2, 5, 6, 7))
    last = x.to(memory_format=torch.channels_last)
    assert torch.equal(counted(last, 8.0, -400, 800), counted(x, 8.0, -400, 800))
    assert torch.equal(counted(x[:, 1:3], 8.0, -400, 800).sum(), torch.tensor(2 * 2 * 6 * 7))


@pytest.mark.parametrize("value", [8.0, -0.1, 1e30, -1e30, float("nan"), float("inf")])
def test_a_value_in_no_bin_is_refused(value: float) -> None:
    x = torch.full((100,), 2.0)
    x[70] = value
    with pytest.raises(ValueError, match="outside of the 8 bins"):
        extension.native().count_bins(x, 1.0, 0, 8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30, -0.5, 8.0])
def test_a_value_in_no_bin_is_seen_wherever_it_is(bad: float) -> None:
    """Four are looked at at once, and what is left over."""
    for size in range(1, 10):
        for place in range(size):
            x = torch.arange(size, dtype=torch.float32) % 8
            assert int(extension.native().count_bins(x, 1.0, 0, 8).sum()) == size
            x[place] = bad
            with pytest.raises(ValueError, match="lies outside of the 8 bins"):
                extension.native().count_bins(x, 1.0, 0, 8)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rounding_is_that_of_fake_quantize(sizes: tuple[int, ...], in_place: bool) -> None:
    scale, zero = torch.tensor(0.0625), 37
    x = _values(sizes)
    if x.numel() > 6:
        x.view(-1)[:7] = torch.tensor([0.5, 1.5, -0.5, 2.5, 1e30, -1e30, -0.0]) * scale
    wanted = torch.fake_quantize_per_tensor_affine(x, float(scale), zero, 0, 255)
    given = x.clone()
    found = rounded(given, float(1 / scale), -zero, 255 - zero, float(scale), in_place=in_place)
    assert torch.equal(found, wanted)
    assert (found.data_ptr() == given.data_ptr()) == in_place or not x.numel()
    assert in_place or torch.equal(given, x)


def test_rounding_keeps_nan_order_and_gradients() -> None:
    x = _values((2, 5, 6, 7)).to(memory_format=torch.channels_last)
    x[0, 1, 2, 3] = float("nan")
    found = rounded(x, 16.0, -100, 155, 1 / 16)
    assert found.stride() == x.stride()
    plain = rounded(x.contiguous(), 16.0, -100, 155, 1 / 16)
    torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)
    assert int(found.isnan().sum()) == 1
    apart = _values((4, 8))[:, ::2]
    torch.testing.assert_close(
        rounded(apart, 16.0, -9, 9, 1 / 16), (apart * 16).round().clamp(-9, 9) / 16
    )
    assert rounded(_values((3,)).requires_grad_(), 16.0, -9, 9, 1 / 16).requires_grad


def test_what_does_not_fit_is_refused() -> None:
    native, x = extension.native(), torch.zeros(6)
    for wrong in (
        (x, 1.0, -1, 1, 1.0, torch.zeros(5)),
        (x.double(), 1.0, -1, 1, 1.0, x),
        (x, 1.0, 1, -1, 1.0, x),
        (x, 1.0, -(1 << 23), 1, 1.0, x),
        (torch.zeros(2, 6)[:, :3], 1.0, -1, 1, 1.0, x),
    ):
        with pytest.raises(ValueError, match=r"values|codes"):
            native.round_floats(*wrong)
    with pytest.raises(ValueError, match="bins"):
        native.count_bins(x, 1.0, 0, 0)
