"""Classifiers of many architectures, trained for seconds on scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.trained.network import Trained, batches, fitted, joined


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All pictures [N, 1, 8, 8], from 0 to 1, and what they show, in an order of their own."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return x[order], torch.tensor(data.target)[order]


def classifier(make: Callable[[], nn.Module], steps: int = 300) -> Trained:
    """A network for digits, at twice their size."""
    torch.manual_seed(0)
    x, y = digits()
    x = functional.interpolate(x, size=(16, 16), mode="bilinear")
    half = len(x) // 2

    def draw(_: int) -> tuple[torch.Tensor, ...]:
        some = torch.randint(half, (64,))
        return x[some], y[some]

    model = fitted(make(), draw, functional.cross_entropy, steps)
    test = batches(x[half:])
    right = y[half : half + len(joined(test))]
    return Trained(
        model,
        batches(x[:256]),
        test,
        "accuracy %",
        lambda found: 100 * float((found.argmax(1) == right).float().mean()),
    )


def _norm_conv(i: int, o: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(o)]


class _Inverted(nn.Module):
    """An inverted residual; with ``gates`` as in MobileNetV3."""

    def __init__(self, width: int, gates: bool) -> None:
        super().__init__()
        act = nn.Hardswish if gates else nn.ReLU6
        wide = 4 * width
        self.widen = nn.Sequential(*_norm_conv(width, wide, 1), act())
        self.depthwise = nn.Sequential(*_norm_conv(wide, wide, 3, groups=wide), act())
        self.gate = (
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(wide, width, 1),
                nn.ReLU(),
                nn.Conv2d(width, wide, 1),
                nn.Hardsigmoid(),
            )
            if gates
            else None
        )
        self.narrow = nn.Sequential(*_norm_conv(wide, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.depthwise(self.widen(x))
        if self.gate is not None:
            wide = wide * self.gate(wide)
        return x + self.narrow(wide)


class _ConvNeXt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(functional.gelu(self.widen(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)


def _between(*blocks: nn.Module, width: int = 32) -> nn.Module:
    stem = [*_norm_conv(1, width, 3, 2), nn.ReLU6()]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )


class _Attention(nn.Module):
    """A vision transformer of patches of 4 × 4."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.place
        found: torch.Tensor = self.head(self.blocks(tokens).mean(1))
        return found


class _Rows(nn.Module):
    """A recurrent network that reads a picture row by row."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rows = kind(16, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.rows(x.squeeze(1))[0][:, -1])
        return found


def depthwise() -> Trained:
    """As MobileNetV2."""
    return classifier(lambda: _between(*(_Inverted(32, gates=False) for _ in range(3))))


def squeeze_excite() -> Trained:
    """As MobileNetV3."""
    return classifier(lambda: _between(*(_Inverted(32, gates=True) for _ in range(3))))


def convnext() -> Trained:
    """As ConvNeXt."""
    return classifier(lambda: _between(*(_ConvNeXt(32) for _ in range(3))))


def attention() -> Trained:
    """As ViT."""
    return classifier(_Attention)


def lstm() -> Trained:
    """Two layers."""
    return classifier(lambda: _Rows(nn.LSTM))


def gru() -> Trained:
    """Two layers."""
    return classifier(lambda: _Rows(nn.GRU))
