"""Convolutions of many channels by 4 x 4 tiles, where a call has pixels enough for them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from tests.native import capi
from x86quant import extension
from x86quant.runtime.programs import LayerWeights, Programs

_THREE, _ONE, _NONE = capi._I32x3(1, 3, 3), capi._I32x3(1, 1, 1), capi._I32x3(0, 1, 1)


@pytest.mark.parametrize(
    ("isa", "channels", "pixels", "algo"),
    [
        ("avx2", 512, 0, "winograd"),
        ("avx2", 512, 64, "winograd"),
        ("avx2", 512, 128, "winograd4"),
        ("avx512_vnni", 512, 128, "dense"),
        ("avx512_vnni", 512, 512, "winograd4"),
        ("avx512_vnni", 256, 0, "winograd4"),
    ],
)
def test_the_number_of_pixels_decides(isa: str, channels: int, pixels: int, algo: str) -> None:
    library = capi.Library(Path(extension.__file__).with_name("_C.so")).lib
    conv = capi.Conv(channels, channels, 1, _THREE, _ONE, _NONE, _ONE, 0, 0, pixels)
    assert library.xq_conv_algo(ctypes.byref(conv), capi.ISAS[isa]) == capi.ALGOS[algo]


def test_packing_is_told_the_pixels_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of wide layers alone: how others are packed does not depend on them."""
    told: list[list[int]] = []
    packed = Programs.packed

    def seen(
        programs: Programs, kernel: str, layer: LayerWeights, known: torch.Tensor | None = None
    ) -> object:
        told.append(layer.geometry[14:])
        return packed(programs, kernel, layer, known)

    monkeypatch.setattr(Programs, "packed", seen)
    sizes = [(8, 264, 3, 1, 1), (264, 8, 1), (8, 8, 3), (8, 8, 1)]  # the last one gives floats
    model = nn.Sequential(*(nn.Conv2d(*each) for each in sizes))
    x = torch.randn(1, 8, 12, 12)
    module = x86quant.quantize(
        model.eval(), [(x,)], mode="static", speed_check=False, progress=False
    )
    module(x)
    assert sorted(told) == [[], [128], [128]]  # 144, rounded down
