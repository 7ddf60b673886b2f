"""Sums of a layer's output channels, which bias correction takes from those of its input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from x86quant.quantization.kit.channel_sums import channel_sums

LAYERS = {
    "pointwise": (nn.Conv2d(6, 4, 1), (2, 6, 5, 7)),
    "padded": (nn.Conv2d(6, 4, 3, padding=1), (2, 6, 5, 7)),
    "wide padding": (nn.Conv2d(3, 4, 3, padding=4, stride=3), (1, 3, 4, 2)),
    "strided": (nn.Conv2d(6, 4, (3, 5), stride=(2, 3), padding=(1, 2)), (2, 6, 11, 13)),
    "dilated": (nn.Conv2d(6, 4, 3, dilation=2, padding=3, bias=False), (2, 6, 9, 8)),
    "grouped": (nn.Conv2d(6, 9, 3, groups=3, stride=2), (2, 6, 8, 9)),
    "depthwise": (nn.Conv2d(6, 6, 5, groups=6, padding=2), (2, 6, 8, 9)),
    "sequence": (nn.Conv1d(6, 4, 4, stride=2, padding=1), (3, 6, 12)),
    "volume": (nn.Conv3d(2, 4, 3, padding=1, stride=2), (2, 2, 5, 6, 7)),
    "without batch": (nn.Conv2d(6, 4, 3, padding=1), (6, 5, 7)),
    "reflected": (nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), (2, 6, 5, 7)),
    "same": (nn.Conv2d(6, 4, 3, padding="same"), (2, 6, 5, 7)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2), (2, 6, 5, 7)),
    "linear": (nn.Linear(6, 4), (2, 5, 6)),
    "of one vector": (nn.Linear(6, 4), (6,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_they_are_those_of_the_output(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        found, count = channel_sums(layer, x)
        y = layer(x)
    channel = {"linear": 2, "without batch": 0, "of one vector": 0}.get(name, 1)
    assert count == y.numel() // y.shape[channel]
    torch.testing.assert_close(found, y.movedim(channel, 0).reshape(len(found), -1).sum(1))
