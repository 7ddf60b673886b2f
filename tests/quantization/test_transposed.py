"""Transposed convolutions: their weights have a range for each output channel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import x86quant
from x86quant.compiled import CompiledModule
from x86quant.quantization.preparing import prepare
from x86quant.quantization.settings import Settings


@pytest.mark.parametrize("groups", [1, 2])
def test_a_large_channel_takes_no_codes_from_others(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(8, 6, 2, 2, groups=groups)
    layer.weight.data[:, 0] *= 10.0
    model = nn.Sequential(layer, nn.ReLU()).eval()
    data = [torch.randn(2, 8, 5, 5) for _ in range(8)]

    (part,) = prepare(model, data, Settings(effort="fast", progress=False)).parts
    (known,) = part.layers
    module = part.module(known.node)
    assert module is not None
    rounded = part.rounded_layer(known.node, module).weight.real()
    weight = layer.weight.detach()
    steps = weight.abs().amax((0, 2, 3), keepdim=True) / 127
    assert bool(((rounded - weight).abs() <= 0.5001 * steps).all())

    int8 = x86quant.quantize(model, data, speed_check=False, progress=False)
    assert isinstance(int8, CompiledModule)
    assert not int8.float_nodes
    with torch.no_grad():
        off = (int8(data[0]) - int8.graph_module(data[0])).abs().max()
    assert off == 0
