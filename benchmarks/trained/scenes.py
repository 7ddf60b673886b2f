"""Digits in larger pictures: where they are, which pixels are theirs, and lines of them read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.trained.digits import digits
from benchmarks.trained.network import Trained, batches, fitted, some_of

_SIZE = 32


def scenes(
    count: int, first: int, last: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures [N, 1, 32, 32] of one digit in noise, its corner [N, 2], and its pixels."""
    x, _ = digits()
    generator = torch.Generator().manual_seed(seed)
    pictures = 0.3 * torch.rand(count, 1, _SIZE, _SIZE, generator=generator)
    pixels = torch.zeros(count, 1, _SIZE, _SIZE)
    corners = torch.randint(_SIZE - 15, (count, 2), generator=generator)
    chosen = torch.randint(first, last, (count,), generator=generator)
    for n, (digit, (top, left)) in enumerate(zip(chosen, corners.tolist(), strict=True)):
        drawn = functional.interpolate(x[digit][None], size=(16, 16), mode="bilinear")[0]
        pictures[n, :, top : top + 16, left : left + 16] += drawn
        pixels[n, :, top : top + 16, left : left + 16] = (drawn > 0.4).float()
    return pictures, corners, pixels


def conv_block(i: int, o: int, stride: int = 1) -> list[nn.Module]:
    """A convolution of 3 x 3, its norm and a ReLU."""
    return [nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]


class _Detector(nn.Module):
    """Scores and boxes of a grid of 8 × 8 cells, in one tensor: box pixels beside a score."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv_block(1, 16), *conv_block(16, 32, 2), *conv_block(32, 64, 2)
        )
        self.more = nn.Sequential(*conv_block(64, 64), *conv_block(64, 64))
        self.score, self.box = nn.Conv2d(64, 1, 1), nn.Conv2d(64, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.more(self.body(x))
        return torch.cat([_SIZE * self.box(y), self.score(y)], 1).flatten(2)


def _detection_loss(found: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
    cells = ((corners + 8) // 4).clamp(max=7)
    place = cells[:, 0] * 8 + cells[:, 1]
    boxes = found[torch.arange(len(found)), :2, place] / _SIZE
    return (
        functional.cross_entropy(found[:, 2], place)
        + 20 * (boxes - corners / _SIZE).square().sum(1).mean()
    )


def overlapping(corners: torch.Tensor, right: torch.Tensor) -> float:
    """The percentage of digits found: intersection over union of more than half."""
    common = (16 - (corners - right).abs()).clamp(min=0).prod(1)
    return 100 * float((common / (512 - common) > 0.5).float().mean())


def detector() -> Trained:
    """Metric: digits whose best box overlaps theirs by more than half (intersection over union)."""
    torch.manual_seed(0)
    seen, corners, _ = scenes(1024, 0, 900, 0)
    draw = some_of(seen, corners, count=32)

    model = fitted(_Detector(), draw, _detection_loss, 300)
    test, right, _ = scenes(256, 900, 1797, 1)

    def score(found: torch.Tensor) -> float:
        best = found[:, 2].argmax(1)
        return overlapping(found[torch.arange(len(found)), :2, best], right)

    return Trained(model, batches(seen[:128]), batches(test), "boxes found %", score)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(*conv_block(1, 16))
        self.down2 = nn.Sequential(*conv_block(16, 32, 2))
        self.down3 = nn.Sequential(*conv_block(32, 64, 2))
        self.up2 = nn.ConvTranspose2d(64, 32, 2, 2)
        self.mix2 = nn.Sequential(*conv_block(64, 32))
        self.up1 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.mix1 = nn.Sequential(*conv_block(32, 16), nn.Conv2d(16, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(a)
        y = self.mix2(torch.cat([self.up2(self.down3(b)), b], 1))
        found: torch.Tensor = self.mix1(torch.cat([self.up1(y), a], 1))
        return found


def segmentation() -> Trained:
    """A U-Net. Metric: intersection over union of the pixels."""
    return segmented(_UNet)


def segmented(make: Callable[[], nn.Module]) -> Trained:
    """A network for the pixels of digits. Metric: intersection over union."""
    torch.manual_seed(0)
    seen, _, pixels = scenes(1024, 0, 900, 0)
    draw = some_of(seen, pixels, count=16)

    model = fitted(make(), draw, functional.binary_cross_entropy_with_logits, 120)
    test, _, right = scenes(128, 900, 1797, 1)

    def score(found: torch.Tensor) -> float:
        here, wanted = found > 0, right > 0
        return 100 * float((here & wanted).sum() / (here | wanted).sum())

    return Trained(model, batches(seen[:128]), batches(test), "IoU %", score)


class _Heatmaps(nn.Module):
    """Down and up again by transposed convolutions; a map for each of two points."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            *conv_block(1, 32), *conv_block(32, 48, 2), *conv_block(48, 96, 2)
        )
        up: list[nn.Module] = []
        for i, o in ((96, 48), (48, 48)):
            up += [nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        self.up = nn.Sequential(*up, nn.Conv2d(48, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.up(self.down(x))
        return found


#: Where the two points are from a digit's corner, down and to the right.
_POINTS = (2, 13)


def heatmaps() -> Trained:
    """As networks for poses. Metric: points found to within a pixel."""
    torch.manual_seed(0)
    seen, corners, _ = scenes(768, 0, 900, 0)
    along = torch.arange(float(_SIZE))

    def draw(_: int) -> tuple[torch.Tensor, ...]:
        some = torch.randint(len(seen), (16,))
        places = [corners[some].float() + point for point in _POINTS]
        near = [torch.exp(-((along - x[..., None]) ** 2) / 8) for x in places]
        return seen[some], torch.stack([x[:, 0, :, None] * x[:, 1, None] for x in near], 1)

    model = fitted(_Heatmaps(), draw, lambda x, y: 50 * functional.mse_loss(x, y), 200)
    test, right, _ = scenes(128, 900, 1797, 1)

    def score(found: torch.Tensor) -> float:
        best = found.flatten(2).argmax(2)
        places = torch.stack([best // _SIZE, best % _SIZE], 2)
        wanted = right[:, None] + torch.tensor(_POINTS)[:, None]
        return 100 * float(((places - wanted).abs().amax(2) <= 1).float().mean())

    return Trained(model, batches(seen[:96]), batches(test), "points found %", score)


class _LineReader(nn.Module):
    """Convolutions, an LSTM in both directions, and a score of each character for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv_block(1, 24),
            nn.MaxPool2d(2),
            *conv_block(24, 48),
            nn.MaxPool2d((2, 1)),
            *conv_block(48, 48),
        )
        self.columns = nn.LSTM(192, 64, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x).flatten(1, 2).transpose(1, 2)
        found: torch.Tensor = self.head(self.columns(y)[0])
        return found


_LETTERS = 5


def lines(count: int, first: int, last: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lines [N, 1, 16, 80] of five digits, and what they say."""
    x, y = digits()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(first, last, (count, _LETTERS), generator=generator)
    drawn = functional.interpolate(x[chosen.flatten()], size=(16, 12), mode="bilinear")
    pictures = 0.2 * torch.rand(count, 1, 16, 80, generator=generator)
    for n in range(_LETTERS):
        left = 2 + 15 * n
        pictures[..., left : left + 12] += drawn.view(count, _LETTERS, 1, 16, 12)[:, n]
    return pictures, y[chosen]


def line_reader() -> Trained:
    """Trained by CTC. Metric: lines read without a mistake."""
    torch.manual_seed(0)
    seen, said = lines(2048, 0, 900, 0)
    draw = some_of(seen, said, count=32)

    def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        scores = found.log_softmax(2).transpose(0, 1)
        lengths = (torch.full((len(found),), n) for n in (len(scores), _LETTERS))
        return functional.ctc_loss(scores, wanted + 1, *lengths)

    model = fitted(_LineReader(), draw, loss, 300, 1e-2)
    test, right = lines(256, 900, 1797, 1)

    def score(found: torch.Tensor) -> float:
        read = [torch.unique_consecutive(row).tolist() for row in found.argmax(2)]
        told = [[code - 1 for code in row if code] for row in read]
        return 100 * sum(a == b for a, b in zip(told, right.tolist(), strict=True)) / len(told)

    return Trained(model, batches(seen[:128]), batches(test), "lines read %", score)
