"""The reference against arithmetic written out by hand, and against exact float64."""

from __future__ import annotations

import pytest
import torch

from x86quant.kernels import reference


def test_linear_by_hand():
    x = torch.tensor([[255, 0, 3]], dtype=torch.uint8)
    weight = torch.tensor([[-128, 127, 1], [127, 127, 127]], dtype=torch.int8)
    got = reference.accumulate_linear(x, 3, weight, torch.tensor([0, 7]))
    assert got.tolist() == [[252 * -128 - 3 * 127, 252 * 120 - 3 * 120]]


def test_accumulators_are_exact_past_32_bits():
    x = torch.full((1, 70_000), 255, dtype=torch.uint8)
    weight = torch.full((1, 70_000), 127, dtype=torch.int8)
    assert reference.accumulate_linear(x, 0, weight).item() == 255 * 127 * 70_000 > 2**31


def test_padding_is_the_zero_point():
    x = torch.full((1, 1, 3, 3), 9, dtype=torch.uint8)
    weight = torch.ones(1, 1, 3, 3, dtype=torch.int8)
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    got = reference.accumulate_conv(x, 5, weight, **geometry)
    assert got[0, 0].tolist() == [[16, 24, 16], [24, 36, 24], [16, 24, 16]]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_by_loops(dims, transposed):
    """Against the definition: each input scattered to (or gathered by) each tap."""
    torch.manual_seed(dims)
    size, kernel, stride, padding, dilation, groups = 5, 3, 2, 1, 2, 2
    x = torch.randint(0, 256, (1, 4) + (size,) * dims).to(torch.uint8)
    shape = (4, 3) if transposed else (6, 2)
    weight = torch.randint(-128, 128, shape + (kernel,) * dims).to(torch.int8)
    got = reference.accumulate_conv(
        x,
        7,
        weight,
        stride=(stride,) * dims,
        padding=(padding,) * dims,
        dilation=(dilation,) * dims,
        groups=groups,
        transposed=transposed,
        output_padding=(1,) * dims if transposed else (),
    )
    if transposed:
        assert got.shape[2:] == ((size - 1) * stride - 2 * padding + dilation * 2 + 2,) * dims
    else:
        assert got.shape[2:] == ((size + 2 * padding - dilation * 2 - 1) // stride + 1,) * dims
    want = torch.zeros_like(got)
    small, large = (x, got) if transposed else (got, x)
    for at in torch.cartesian_prod(*[torch.arange(n) for n in small.shape[2:]]).view(-1, dims):
        for tap in torch.cartesian_prod(*[torch.arange(kernel)] * dims).view(-1, dims):
            there = (at * stride - padding + tap * dilation).tolist()
            if not all(0 <= i < n for i, n in zip(there, large.shape[2:], strict=True)):
                continue
            here, to = (0, slice(None), *at.tolist()), (0, slice(None), *there)
            place = (slice(None), slice(None), *tap.tolist())
            w = weight[place].long()
            for g in range(groups):
                if transposed:
                    values = x[here][2 * g : 2 * g + 2].long() - 7
                    want[to][3 * g : 3 * g + 3] += values @ w[2 * g : 2 * g + 2]
                else:
                    values = x[to][2 * g : 2 * g + 2].long() - 7
                    want[here][3 * g : 3 * g + 3] += w[3 * g : 3 * g + 3] @ values
    assert torch.equal(got, want)


def test_transposed_per_channel_zero_points_repeat_for_each_group():
    x = torch.ones(1, 2, 1, dtype=torch.uint8)
    weight = torch.full((2, 2, 1), 10, dtype=torch.int8)
    zero_points = torch.tensor([1, 2, 3, 4])
    geometry = {"stride": (1,), "padding": (0,), "dilation": (1,)}
    got = reference.accumulate_conv(
        x, 0, weight, zero_points, groups=2, transposed=True, **geometry
    )
    assert got.flatten().tolist() == [9, 8, 7, 6]


def test_halves_round_to_even_and_ends_clamp():
    accumulator = torch.tensor([[1, 3, 5, -1, -3, 10_000, -10_000]])
    got = reference.requantize(accumulator, 0.5, None, 100, channel_axis=1)
    assert got.tolist() == [[100, 102, 102, 100, 98, 255, 0]]


def test_relu_clamps_at_the_zero_point():
    got = reference.requantize(torch.tensor([[-50, 50]]), 1.0, None, 100, channel_axis=1, relu=True)
    assert got.tolist() == [[100, 150]]


def test_requantize_per_channel_with_bias():
    accumulator = torch.ones(1, 2, 1, dtype=torch.int64)
    multiplier, bias = torch.tensor([10.0, 20.0]), torch.tensor([1.0, -1.0])
    got = reference.requantize(accumulator, multiplier, bias, 0, channel_axis=1)
    assert got.flatten().tolist() == [11, 19]


def test_dynamic_linear_is_within_the_steps_of_its_input():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 33), torch.randint(-127, 128, (7, 33)).to(torch.int8)
    scale, bias = torch.rand(7) * 0.01, torch.randn(7)
    want = torch.nn.functional.linear(x, weight * scale[:, None], bias).relu()
    got = reference.linear_dynamic(x, weight, scale, 0, bias, relu=True)
    step = (x.max() - x.min()) / 255
    assert (got - want).abs().max() < step * 33 * 127 * scale.max() / 2


@pytest.mark.parametrize("x", [torch.zeros(2, 4), torch.empty(0, 4)])
def test_dynamic_linear_without_a_range(x):
    got = reference.linear_dynamic(x, torch.ones(3, 4, dtype=torch.int8), 1.0)
    assert got.shape == (x.shape[0], 3)
    assert not got.any()
