"""What stands behind last products: upsampled classes, decoded boxes, pixels made of channels."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from benchmarks.trained.network import Trained, batches, fitted
from benchmarks.trained.scenes import conv_block, scenes, segmented


class _Pyramid(nn.Module):
    """Convolutions of several dilations side by side, and the mean of all, as in DeepLab."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        convs = (nn.Conv2d(i, o, k, 1, d * (k // 2), d) for k, d in ((1, 1), (3, 2), (3, 4)))
        self.branches = nn.ModuleList(
            [nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU()) for conv in convs]
        )
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(i, o, 1), nn.ReLU())
        self.join = nn.Sequential(nn.Conv2d(4 * o, o, 1), nn.BatchNorm2d(o), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = functional.interpolate(self.mean(x), size=x.shape[-2:], mode="bilinear")
        found: torch.Tensor = self.join(torch.cat([*(one(x) for one in self.branches), mean], 1))
        return found


class _DeepLab(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(*conv_block(1, 16), *conv_block(16, 24, 2))
        self.high = nn.Sequential(*conv_block(24, 64, 2), *conv_block(64, 64), _Pyramid(64, 48))
        self.side = nn.Sequential(nn.Conv2d(24, 16, 1), nn.ReLU())
        self.head = nn.Sequential(*conv_block(64, 48), nn.Conv2d(48, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(x)
        high = functional.interpolate(self.high(low), size=low.shape[-2:], mode="bilinear")
        y = self.head(torch.cat([high, self.side(low)], 1))
        return functional.interpolate(y, size=x.shape[-2:], mode="bilinear")


def deeplab() -> Trained:
    """As DeepLab. Metric: intersection over union of the pixels."""
    return segmented(_DeepLab)


_SIDE, _SIZES, _STEPS = 32, (14.0, 18.0), (4, 8)


class _SSD(nn.Module):
    """Boxes beside anchors of two grids, decoded, and the probabilities of both classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            *conv_block(1, 24), *conv_block(24, 32, 2), *conv_block(32, 48, 2)
        )
        self.coarse = nn.Sequential(*conv_block(48, 64, 2))
        self.boxes = nn.ModuleList([nn.Conv2d(i, 8, 3, 1, 1) for i in (48, 64)])
        self.classes = nn.ModuleList([nn.Conv2d(i, 4, 3, 1, 1) for i in (48, 64)])
        anchors = [
            [(x + 0.5) * step, (y + 0.5) * step, size, size]
            for step in _STEPS
            for y in range(_SIDE // step)
            for x in range(_SIDE // step)
            for size in _SIZES
        ]
        self.register_buffer("anchors", torch.tensor(anchors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.fine(x)
        maps = (fine, self.coarse(fine))
        boxes, classes = (
            torch.cat([
                head(y).permute(0, 2, 3, 1).reshape(len(x), -1, size)
                for head, y in zip(heads, maps, strict=True)
            ], 1)
            for heads, size in ((self.boxes, 4), (self.classes, 2))
        )  # fmt: skip
        place, size = self.anchors[:, :2], self.anchors[:, 2:]  # type: ignore[index]
        middle = place + 0.1 * boxes[..., :2] * size
        half = size * torch.exp(0.2 * boxes[..., 2:]) / 2
        return torch.cat([middle - half, middle + half, classes.softmax(-1)], -1)


def _overlap(boxes: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Intersection over union with boxes of 16 x 16."""
    first = torch.maximum(boxes[..., :2], wanted[..., :2])
    last = torch.minimum(boxes[..., 2:4], wanted[..., 2:])
    common = (last - first).clamp(min=0).prod(-1)
    return common / ((boxes[..., 2:4] - boxes[..., :2]).prod(-1) + 256 - common)


def ssd() -> Trained:
    """As SSD. Metric: digits whose best box overlaps theirs by more than half."""
    torch.manual_seed(0)
    seen, corners, _ = scenes(1024, 0, 900, 0)
    model = _SSD()
    anchors = model.anchors
    assert isinstance(anchors, torch.Tensor)
    grid = torch.cat([anchors[:, :2] - anchors[:, 2:] / 2, anchors[:, :2] + anchors[:, 2:] / 2], 1)

    def boxes_of(corners: torch.Tensor) -> torch.Tensor:
        first = corners.flip(1).float()
        return torch.cat([first, first + 16], 1)

    def draw(_: int) -> tuple[torch.Tensor, ...]:
        some = torch.randint(len(seen), (32,))
        return seen[some], boxes_of(corners[some])

    def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        shared = _overlap(grid[None], wanted[:, None])
        own = ((shared > 0.5) | (shared == shared.amax(1, keepdim=True))).float()
        off = functional.smooth_l1_loss(
            found[..., :4], wanted[:, None].expand(-1, len(grid), -1), reduction="none"
        )
        classes = found[..., 5].clamp(1e-5, 1 - 1e-5)
        entropy = functional.binary_cross_entropy(classes, own, reduction="none")
        return 0.2 * ((off.sum(2) * own).sum() / own.sum() + entropy.sum(1).mean())

    fitted(model, draw, loss, 300)
    test, right, _ = scenes(256, 900, 1797, 1)

    def score(found: torch.Tensor) -> float:
        best = found[torch.arange(len(found)), found[..., 5].argmax(1)]
        return 100 * float((_overlap(best, boxes_of(right)) > 0.5).float().mean())

    return Trained(model, batches(seen[:128]), batches(test), "boxes found %", score)
