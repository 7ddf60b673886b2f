"""Inputs of the zoo's models, and layers that many of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.cases import MakeInputs


def images(channels: int = 3, sizes: tuple[int, int, int] = (24, 32, 40)) -> MakeInputs:
    """Square images of three sizes."""
    return lambda batch, size: (torch.randn(batch, channels, sizes[size], sizes[size]),)


def rows(features: int = 16) -> MakeInputs:
    """Vectors: there is one size only."""
    return lambda batch, size: (torch.randn(batch, features),)


def sequences(features: int = 16, lengths: tuple[int, int, int] = (5, 12, 19)) -> MakeInputs:
    """Sequences [batch, length, features] of three lengths."""
    return lambda batch, size: (torch.randn(batch, lengths[size], features),)


def signals(channels: int = 8, lengths: tuple[int, int, int] = (32, 48, 64)) -> MakeInputs:
    """Signals [batch, channels, length] of three lengths."""
    return lambda batch, size: (torch.randn(batch, channels, lengths[size]),)


def tokens(vocabulary: int = 50, lengths: tuple[int, int, int] = (5, 12, 19)) -> MakeInputs:
    """Sequences of token numbers."""
    return lambda batch, size: (torch.randint(0, vocabulary, (batch, lengths[size])),)


class Body(nn.Module):
    """Layers ``a``, ``b``, ``c`` and a forward given as a function of the module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """What the function makes of them."""
        return self._forward(self, *inputs, **more)


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    """A convolution that keeps the size."""
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def block(inputs: int, outputs: int, **options: Any) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    return nn.Sequential(conv(inputs, outputs, **options), nn.BatchNorm2d(outputs), nn.ReLU())
