"""Small transformers as people write them with torch's layers, called with one row at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.trained.audio import drawn_waves
from benchmarks.trained.network import Trained, batches, fitted, some_of
from benchmarks.trained.scenes import conv_block, lines, overlapping, scenes

_WIDE = 64


def _encoder(layers: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        _WIDE, 4, 2 * _WIDE, 0.0, functional.gelu, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(_WIDE), enable_nested_tensor=False)


class _Reader(nn.Module):
    """Columns of a line are looked at by a query for each letter, which knows its place alone."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Conv2d(1, _WIDE, (16, 5), (16, 5))
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, _WIDE))
        self.body = _encoder(2)
        self.letters = nn.Parameter(torch.randn(1, 5, _WIDE))
        self.look = nn.MultiheadAttention(_WIDE, 4, batch_first=True)
        self.head = nn.Linear(_WIDE, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.body(self.columns(x).flatten(2).transpose(1, 2) + self.places)
        found: torch.Tensor = self.head(
            self.look(self.letters.expand(len(x), -1, -1), seen, seen)[0]
        )
        return found


def query_reader() -> Trained:
    """Metric: lines read without a mistake."""
    torch.manual_seed(0)
    seen, said = lines(2048, 0, 900, 0)
    draw = some_of(seen, said, count=32)

    def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(found.flatten(0, 1), wanted.flatten())

    model = fitted(_Reader(), draw, loss, 700, 2e-3)
    test, right = lines(256, 900, 1797, 1)

    def score(found: torch.Tensor) -> float:
        return 100 * float((found.argmax(2) == right).all(1).float().mean())

    return Trained(model, batches(seen[:128]), batches(test, 1), "lines read %", score)


class _SetDetector(nn.Module):
    """As DETR: an encoder of what convolutions see, and a decoder of queries for objects."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_block(1, 32, 2), *conv_block(32, _WIDE, 2))
        self.places = nn.Parameter(0.1 * torch.randn(1, 64, _WIDE))
        self.queries = nn.Parameter(torch.randn(1, 8, _WIDE))
        self.layers = nn.Transformer(_WIDE, 4, 2, 2, 2 * _WIDE, 0.0, batch_first=True)
        self.score = nn.Linear(_WIDE, 1)
        self.box = nn.Sequential(nn.Linear(_WIDE, _WIDE), nn.ReLU(), nn.Linear(_WIDE, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.body(x).flatten(2).transpose(1, 2) + self.places
        found = self.layers(seen, self.queries.expand(len(x), -1, -1))
        return torch.cat([self.box(found).sigmoid(), self.score(found)], 2)


def set_detector() -> Trained:
    """Metric: digits whose best box overlaps theirs by more than half (intersection over union)."""
    torch.manual_seed(0)
    seen, corners, _ = scenes(1024, 0, 900, 0)
    draw = some_of(seen, corners, count=32)

    def loss(found: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
        off = (found[..., :2] - corners[:, None] / 32).square().sum(2)
        best = off.argmin(1)
        nearest = off[torch.arange(len(off)), best]
        return functional.cross_entropy(found[..., 2], best) + 20 * nearest.mean()

    model = fitted(_SetDetector(), draw, loss, 500, 1e-3)
    test, right, _ = scenes(256, 900, 1797, 1)

    def score(found: torch.Tensor) -> float:
        best = found[..., 2].argmax(1)
        return overlapping(found[torch.arange(len(found)), best, :2] * 32, right)

    return Trained(model, batches(seen[:128]), batches(test, 1), "boxes found %", score)


class _Sounds(nn.Module):
    """Patches of a spectrogram beside a token of their own, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, _WIDE, (16, 8), (16, 8))
        self.token = nn.Parameter(torch.zeros(1, 1, _WIDE))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, _WIDE))
        self.body = _encoder(3)
        self.head = nn.Linear(_WIDE, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        found: torch.Tensor = self.head(self.body(x)[:, 0])
        return found


class _Conformer(nn.Module):
    """Attention and convolutions along time in turns, between halves of feed-forward layers."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU()
        )
        self.widen = nn.Linear(32 * 16, _WIDE)
        self.blocks = nn.Sequential(_ConformerBlock(), _ConformerBlock())
        self.head = nn.Linear(_WIDE, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.begin(x).permute(0, 3, 1, 2).flatten(2)
        found: torch.Tensor = self.head(self.blocks(self.widen(steps)).mean(1))
        return found


class _ConformerBlock(nn.Module):
    def __init__(self, taps: int = 9) -> None:
        super().__init__()
        self.before, self.behind = (
            nn.Sequential(
                nn.LayerNorm(_WIDE), nn.Linear(_WIDE, 4 * _WIDE), nn.SiLU(),
                nn.Linear(4 * _WIDE, _WIDE),
            )
            for _ in range(2)
        )  # fmt: skip
        self.first_norm, self.attention = (
            nn.LayerNorm(_WIDE),
            nn.MultiheadAttention(_WIDE, 4, batch_first=True),
        )
        self.second_norm = nn.LayerNorm(_WIDE)
        self.along = nn.Sequential(
            nn.Conv1d(_WIDE, 2 * _WIDE, 1), nn.GLU(1),
            nn.Conv1d(_WIDE, _WIDE, taps, padding=taps // 2, groups=_WIDE),
            nn.BatchNorm1d(_WIDE), nn.SiLU(), nn.Conv1d(_WIDE, _WIDE, 1),
        )  # fmt: skip
        self.last_norm = nn.LayerNorm(_WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.before(x) / 2
        y = self.first_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.along(self.second_norm(x).transpose(1, 2)).transpose(1, 2)
        found: torch.Tensor = self.last_norm(x + self.behind(x) / 2)
        return found


def sounds() -> Trained:
    """Forms of waves told apart by their spectrograms."""
    return _of_spectrograms(_Sounds, 250)


def conformer() -> Trained:
    """The same by a conformer."""
    return _of_spectrograms(_Conformer, 150)


def _of_spectrograms(make: Callable[[], nn.Module], steps: int) -> Trained:
    def draw(seed: int, count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
        x, kinds = drawn_waves(seed, count)
        window = torch.hann_window(128)
        loud = torch.stft(x[:, 0], 128, 32, window=window, return_complex=True).abs()
        return torch.log(loud + 1e-3)[:, None, :64, :32].contiguous(), kinds

    torch.manual_seed(0)
    model = fitted(make(), draw, functional.cross_entropy, steps)
    x, right = draw(10_000, 256)

    def score(found: torch.Tensor) -> float:
        return 100 * float((found.argmax(1) == right).float().mean())

    return Trained(model, batches(draw(20_000, 128)[0]), batches(x, 1), "accuracy %", score)
