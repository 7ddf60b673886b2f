"""Helpers to make stock quantized tensors and packs in tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import torch


def activation(*shape: int, scale: float = 0.05, zero_point: int = 128, seed: int = 0):
    """A quint8 tensor whose codes cover the full range."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch._make_per_tensor_quantized_tensor(codes, scale, zero_point)


def weight(*shape: int, largest: int = 127, axis: int = 0, zero_point: int = 0, seed: int = 0):
    """A per-channel qint8 weight with codes in -largest..largest."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-largest, largest + 1, shape, generator=generator, dtype=torch.int8)
    scales = torch.rand(shape[axis], generator=generator, dtype=torch.double) * 0.01 + 0.005
    zero_points = torch.full((shape[axis],), zero_point)
    return torch._make_per_channel_quantized_tensor(codes, scales, zero_points, axis)


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """The stock engine ``name`` for the length of the block."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest difference of two quantized tensors, in quantization steps."""
    assert a.shape == b.shape
    if a.numel() == 0:
        return 0
    return int((a.int_repr().int() - b.int_repr().int()).abs().max())


def exact_conv(qx, qw, bias, stride, padding, dilation, groups, scale, zero_point):
    """A convolution of quantized tensors in double precision, then quantized."""
    dims = qw.dim() - 2
    scales = qw.q_per_channel_scales().view(1, -1, *(1,) * dims)
    zero_points = qw.q_per_channel_zero_points().view(-1, 1, *(1,) * dims)
    x = qx.int_repr().double() - qx.q_zero_point()
    w = qw.int_repr().double() - zero_points
    acc = torch.ops.aten.convolution(
        x, w, None, stride, padding, dilation, False, [0] * dims, groups
    )
    real = acc * scales * qx.q_scale()
    if bias is not None:
        real = real + bias.double().view(1, -1, *(1,) * dims)
    return torch.quantize_per_tensor(real.float(), scale, zero_point, torch.quint8)


def exact_linear(qx, qw, bias, scale, zero_point):
    """A linear of quantized tensors in double precision, then quantized."""
    real = exact_linear_float(qx, qw, bias)
    return torch.quantize_per_tensor(real, scale, zero_point, torch.quint8)


def exact_linear_float(qx, qw, bias):
    """The same, left as float."""
    w = qw.int_repr().double() - qw.q_per_channel_zero_points().view(-1, 1)
    acc = (qx.int_repr().double() - qx.q_zero_point()) @ w.T
    real = acc * qw.q_per_channel_scales() * qx.q_scale()
    return (real + bias.double() if bias is not None else real).float()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter; what crashes there does not take pytest down."""
    import os

    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=600,  # emulated CPUs are slow
        env={**os.environ, **environment},
    )
