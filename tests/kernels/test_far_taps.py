"""Convolutions whose taps or pixels are far apart: the same bytes, in little memory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import x86quant
from tests.isa import LEVELS, has
from tests.native import capi
from x86quant import extension

MOST_SCRATCH = 8 << 20
FAR = 2**20

#: Channels in and out, groups; kernel, stride, padding and dilation of rows and columns; the image.
CASES: dict[str, tuple[Any, ...]] = {
    "one tap": (64, 64, 1, (1, 1), (2**30, 2**28), (0, 0), (1, 1), (4, 4)),
    "one tap, largest stride": (8, 8, 1, (1, 1), (2**31 - 1, 2**31 - 1), (0, 0), (1, 1), (4, 4)),
    "dilated": (32, 32, 1, (3, 3), (1, 1), (FAR, FAR), (FAR, FAR), (5, 5)),
    "dilated along one axis": (32, 16, 1, (3, 3), (1, 1), (1, FAR), (1, FAR), (5, 5)),
    "stem": (3, 16, 1, (3, 3), (1000, 900), (1, 1), (1, 1), (9, 9)),
    "dilated stem": (3, 16, 1, (3, 3), (2, 1), (700, 700), (700, 700), (9, 9)),
    "depthwise, dilated": (48, 48, 48, (3, 3), (1, 1), (FAR, FAR), (FAR, FAR), (6, 6)),
    "depthwise, strided": (48, 48, 48, (3, 3), (2, FAR), (1, 1), (1, 1), (6, 6)),
    "grouped": (32, 32, 8, (3, 3), (1, 1), (300, 300), (300, 300), (6, 6)),
    "beyond 63": (16, 24, 1, (2, 2), (70, 65), (0, 0), (33, 40), (150, 140)),
    "phases": (24, 24, 1, (5, 3), (6, 4), (2, 1), (4, 2), (40, 37)),
    "some phases": (24, 24, 1, (2, 2), (9, 7), (0, 1), (3, 2), (40, 37)),
    "windows": (64, 40, 1, (3, 3), (1, 1), (9, 7), (9, 7), (17, 15)),
    "windows, the middle tap alone": (36, 40, 1, (3, 3), (1, 1), (20, 20), (20, 20), (17, 15)),
    "windows, strided": (32, 33, 1, (3, 5), (2, 3), (6, 10), (6, 5), (23, 29)),
    "windows of an even kernel": (48, 64, 1, (2, 4), (1, 1), (3, 9), (8, 6), (19, 22)),
    "windows that no tap meets": (32, 16, 1, (3, 3), (1, 1), (12, 14), (4, 5), (9, 8)),
    "windows of one axis": (48, 16, 1, (1, 3), (1, 1), (0, 12), (1, 12), (6, 26)),
}


@pytest.fixture(scope="module")
def lib() -> capi.Library:
    return capi.Library(Path(extension.__file__).with_name("_C.so"))


def _spec(case: tuple[Any, ...], in_zp: int, rng: np.random.Generator) -> capi.ConvSpec:
    inputs, outputs, groups, kernel, stride, padding, dilation, _ = case
    weight = rng.integers(-128, 128, (outputs, inputs // groups, 1, *kernel)).astype(np.int8)
    mult = (rng.random(outputs) * 1e-3).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)
    return capi.ConvSpec(
        weight, mult, bias, None, groups, (1, *stride), (0, *padding), (1, *dilation), False,
        in_zp=in_zp, out_zp=99, lo=0, hi=255, residual=False, res_zp=0, res_mult=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("in_zp", [77, 0])
@pytest.mark.parametrize("name", CASES)
def test_taps_far_apart_give_the_bytes_of_the_plain_loops(
    name: str, in_zp: int, lib: capi.Library
) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    spec = _spec(case, in_zp, rng)
    inputs, outputs, _, kernel, stride, padding, dilation, image = case
    sizes = [
        (image[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    ]
    x = rng.integers(0, 256, (2, 1, *image, inputs)).astype(np.uint8)
    found = {}
    for isa in ("reference", *(level for level in LEVELS if has(level))):
        packed = lib.pack(spec, isa)
        found[isa] = np.zeros((2, 1, *sizes, outputs), np.uint8)
        operands = packed.ctypes.data, capi.Tensor.of(x), capi.Tensor.of(found[isa])
        for threads in (1, 3):
            call = capi.ConvCall(*operands, capi.Tensor.of(None), threads)
            assert lib.lib.xq_conv_scratch(ctypes.byref(call)) < MOST_SCRATCH
            lib.conv(packed, x, found[isa], threads=threads)
            assert np.array_equal(found[isa], found["reference"]), isa
    assert len(np.unique(found["reference"])) > 1


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(64, 64, 1, stride=(2**30, 2**28)),
        nn.Conv2d(16, 16, 3, padding=FAR, dilation=FAR),
        nn.Conv2d(16, 16, 3, padding=FAR, dilation=FAR, groups=16),
        nn.Conv1d(8, 8, 3, stride=2**30, padding=1),
        nn.Sequential(
            nn.Conv2d(16, 8, 1), nn.MaxPool2d((3, FAR), stride=FAR, padding=(1, FAR // 2))
        ),
        nn.Sequential(
            nn.Conv2d(16, 8, 1), nn.AvgPool2d((3, FAR), stride=FAR, padding=(1, FAR // 2))
        ),
    ],
    ids=str,
)
def test_a_quantized_layer_of_such_sizes_is_right(layer: nn.Module) -> None:
    channels = getattr(layer, "in_channels", 16)
    x = torch.randn(1, channels, *([4] * (1 if isinstance(layer, nn.Conv1d) else 2)))
    model = nn.Sequential(layer).eval()
    try:
        expected = model(x)
    except (RuntimeError, MemoryError) as error:
        pytest.skip(f"torch itself: {error}")
    module = x86quant.quantize(model, [(x,)], mode="static", speed_check=False, progress=False)
    apart = float((module(x) - expected).detach().abs().max())
    assert apart < 0.1 * float(expected.detach().abs().max()) + 0.05
