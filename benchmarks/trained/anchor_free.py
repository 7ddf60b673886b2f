"""A detector without anchors: boxes in pixels, and a score beside each, in one tensor."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.trained.network import Trained, batches, fitted
from benchmarks.trained.scenes import scenes

#: The side of a picture, and how much larger than a scene it is.
_SIDE, _LARGER = 160, 5
_BINS = 8


def _conv(i: int, o: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(i, o, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), nn.SiLU())


class _Split(nn.Module):
    """Half of the channels go through residual blocks, and what is found on the way is joined."""

    def __init__(self, i: int, o: int, blocks: int = 1) -> None:
        super().__init__()
        half = o // 2
        self.first, self.last = _conv(i, o, 1), _conv((2 + blocks) * half, o, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(half, half), _conv(half, half)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            found.append(found[-1] + block(found[-1]))
        joined: torch.Tensor = self.last(torch.cat(found, 1))
        return joined


class _Pools(nn.Module):
    """Maxima of ever larger surroundings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = _conv(width, width // 2, 1), _conv(2 * width, width, 1)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.first(x)]
        for _ in range(3):
            found.append(self.pool(found[-1]))
        joined: torch.Tensor = self.last(torch.cat(found, 1))
        return joined


class _Detector(nn.Module):
    """Two grids; sides of boxes are means of distributions, as in YOLOv8."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(_conv(1, w, 3, 2), _conv(w, 2 * w, 3, 2), _Split(2 * w, 2 * w))
        self.fine = nn.Sequential(_conv(2 * w, 4 * w, 3, 2), _Split(4 * w, 4 * w, 2))
        self.coarse = nn.Sequential(_conv(4 * w, 8 * w, 3, 2), _Split(8 * w, 8 * w), _Pools(8 * w))
        self.up = nn.Upsample(scale_factor=2)
        self.mix_fine, self.mix_coarse = _Split(12 * w, 4 * w), _Split(12 * w, 8 * w)
        self.down = _conv(4 * w, 4 * w, 3, 2)
        self.boxes = nn.ModuleList(self._head(x, 4 * _BINS) for x in (4 * w, 8 * w))
        self.scores = nn.ModuleList(self._head(x, 1) for x in (4 * w, 8 * w))
        self.register_buffer("bins", torch.arange(float(_BINS)).view(1, 1, -1, 1))

    @staticmethod
    def _head(i: int, o: int) -> nn.Sequential:
        return nn.Sequential(_conv(i, 32), _conv(32, 32), nn.Conv2d(32, o, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(fine)
        fine = self.mix_fine(torch.cat([self.up(coarse), fine], 1))
        coarse = self.mix_coarse(torch.cat([self.down(fine), coarse], 1))
        found = []
        for y, boxes, scores, step in zip(
            (fine, coarse), self.boxes, self.scores, (8, 16), strict=True
        ):
            n, _, high, wide = y.shape
            sides = (boxes(y).view(n, 4, _BINS, high * wide).softmax(2) * self.bins).sum(2)
            rows, columns = torch.meshgrid(
                torch.arange(high) + 0.5, torch.arange(wide) + 0.5, indexing="ij"
            )
            middle = torch.stack([columns, rows]).view(1, 2, -1)
            before, behind = sides.chunk(2, 1)
            first, last = middle - before, middle + behind
            box = torch.cat([(first + last) / 2, last - first], 1) * step
            found.append(torch.cat([box, scores(y).view(n, 1, -1).sigmoid()], 1))
        return torch.cat(found, 2)


def boxes_with_scores() -> Trained:
    """Metric: digits that the box of the largest score is centred on, but for a tenth."""
    torch.manual_seed(0)
    pictures, corners, _ = scenes(512, 0, 900, 0)
    seen = functional.interpolate(pictures, size=(_SIDE, _SIDE), mode="bilinear")

    def middles(corners: torch.Tensor) -> torch.Tensor:
        return (corners.flip(1).float() + 8) * _LARGER

    def draw(_: int) -> tuple[torch.Tensor, ...]:
        some = torch.randint(len(seen), (8,))
        return seen[some], middles(corners[some])

    def loss(found: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
        across, down = (middle // 8).long().clamp(max=_SIDE // 8 - 1).unbind(1)
        rows, cell = torch.arange(len(found)), down * (_SIDE // 8) + across
        wanted = torch.cat([middle, torch.full_like(middle, 16.0 * _LARGER)], 1)
        own = torch.zeros(len(found), found.shape[2])
        own[rows, cell] = 1
        off = (found[rows, :4, cell] - wanted).abs().mean() / (16 * _LARGER)
        scores = found[:, 4].clamp(1e-6, 1 - 1e-6)
        return 5 * off + 20 * functional.binary_cross_entropy(scores, own)

    model = fitted(_Detector(), draw, loss, 500)
    pictures, corners, _ = scenes(128, 900, 1797, 1)
    test = functional.interpolate(pictures, size=(_SIDE, _SIDE), mode="bilinear")

    def score(found: torch.Tensor) -> float:
        best = found[torch.arange(len(found)), :2, found[:, 4].argmax(1)]
        off = (best - middles(corners)).abs().amax(1)
        return 100 * float((off < _SIDE / 10).float().mean())

    return Trained(model, batches(seen[:48], 4), batches(test, 4), "found %", score)
