"""Architectures and habits of writing them, in plain torch."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.zoo.cases import Animal, Inputs, MakeInputs


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


# ------------------------------------------------------------------------- statements in place


class Clamped(nn.Module):
    """Two convolutions with a statement in place between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 4)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("mem", torch.zeros(1))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        self.between(x)
        return self.b(x)


class ClampInPlace(Clamped):
    def between(self, x):
        x.clamp_(-0.1, 0.1)


class FunctionalReluInPlace(Clamped):
    def between(self, x):
        F.relu(x, inplace=True)


class ModuleReluInPlace(Clamped):
    def between(self, x):
        self.relu(x)


class ReluUnderscore(Clamped):
    def between(self, x):
        torch.relu_(x)


class MaskedFill(Clamped):
    def between(self, x):
        x.masked_fill_(x > 0.2, 0.0)


class MulAdd(Clamped):
    def between(self, x):
        x.mul_(2.0).add_(0.3)


class SliceZeroed(Clamped):
    def between(self, x):
        x[:, :4].mul_(0.0)


class SetItem(Clamped):
    def between(self, x):
        x[:, 2:4] = 0.25


class Augmented(nn.Module):
    """A name for the same tensor, then an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        z = x
        x += 1
        return self.b(z)


class CopiedIntoBuffer(nn.Module):
    """A buffer that is written to and read in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 4)
        self.register_buffer("mem", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        self.mem.copy_(y.mean(0))
        return self.b(y + self.mem)


# ------------------------------------------------------------------------- hooks


def with_forward_hook() -> nn.Module:
    """A hook that doubles the result of a convolution."""
    model = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 4))
    model[0].register_forward_hook(lambda module, args, out: out * 2 + 0.5)
    return model


def with_pre_hook() -> nn.Module:
    """A normalisation as a hook on the model."""
    model = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 4))
    model.register_forward_pre_hook(lambda module, args: ((args[0] - 0.5) * 3,))
    return model


# ------------------------------------------------------------------------- branches


class BatchBranch(nn.Module):
    """What it computes depends on the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        if x.shape[0] > 1:
            y = y * 0.25
        return self.b(y)


class SizeBranch(nn.Module):
    """Large images are pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        if x.shape[2] > 32:
            y = F.max_pool2d(y, 2)
        return self.b(y)


class ValueBranch(nn.Module):
    """What it computes depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        if bool(x[0, 0, 0, 0] > 0):
            y = y * 0.2
        return self.b(y)


class Interpolated(nn.Module):
    """Back to the size of the input, in a dict."""

    def __init__(self, kind: type[dict]) -> None:
        super().__init__()
        self.a, self.b, self.kind = block(3, 8, stride=2), conv(8, 4), kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.b(self.a(x))
        out = F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.kind(out=out, aux=y)


class ScriptedLoop(nn.Module):
    """A loop over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.b(torch.relu(self.a(row))) for row in x])


# ------------------------------------------------------------------------- layers used again


class SharedHead(nn.Module):
    """One head for every level of a pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8)
        self.down = nn.ModuleList([block(8, 8, stride=2), block(8, 8, stride=2)])
        self.head = nn.Sequential(conv(8, 8), nn.ReLU(), conv(8, 6))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        levels = [self.stem(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        return [self.head(level) for level in levels]


class RecurrentLinear(nn.Module):
    """One linear, applied eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(self.a(x)) + 0.5 * x
        return self.b(x)


class CalledTwice(nn.Module):
    """A layer with a ReLU behind one of its two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 3), conv(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(torch.relu(self.a(x))))


class TiedLinears(nn.Module):
    """An autoencoder whose decoder is the encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(self.b(self.a(x))), self.a.weight.t())


class TiedEmbedding(nn.Module):
    """A language model whose head is the embedding table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.mix(self.table(ids))))


# ------------------------------------------------------------------------- gates and slices


class GluByHand(nn.Module):
    """A sigmoid gate on half of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 16), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.a(x).chunk(2, 1)
        return self.b(value * torch.sigmoid(gate))


class YoloHead(nn.Module):
    """Boxes and scores out of the slices of one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = block(3, 16, stride=2), conv(16, 9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(self.stem(x))
        where, size, score = y[:, :2], y[:, 2:4], y[:, 4:]
        return torch.cat(
            [torch.sigmoid(where), torch.exp(size.clamp(max=2)), torch.sigmoid(score)], 1
        )


class UnrolledLSTM(nn.Module):
    """An LSTM written out of two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 16)
        for t in range(4):
            i, f, g, o = (self.a(x[:, t]) + self.b(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


class Hardsigmoided(nn.Module):
    """Squeeze and excitation, sliced before its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.b = conv(3, 8), nn.Conv2d(8, 16, 1), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        gate = F.hardsigmoid(self.gate(y.mean((2, 3), keepdim=True))[:, :8])
        return self.b(y * gate)


# ------------------------------------------------------------------------- masks and indices


class BooleanMask(nn.Module):
    """A product with a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x * (x > 0))


class WhereMask(nn.Module):
    """torch.where with a mask among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(torch.where(mask, y, y.new_zeros(())))


class OneHot(nn.Module):
    """A class number as a one-hot vector beside the features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(26, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(torch.cat([x, F.one_hot(kind, 10).float()], 1))))


class GraphNetwork(nn.Module):
    """Messages along edges, summed with index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.out = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            source, target = edges[0], edges[1]
            messages = torch.relu(self.message(torch.cat([x[source], x[target]], 1)))
            summed = torch.zeros_like(x).index_add(0, target, messages)
            x = torch.relu(self.update(torch.cat([x, summed], 1)))
        return self.out(x)


class ScatterGather(nn.Module):
    """Pooling by group number with scatter_add, and back with gather."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        index = group[:, None].expand(-1, 16)
        pooled = torch.zeros(4, 16).scatter_add(0, index, y)
        return self.b(torch.gather(pooled, 0, index) * 0.1 + y)


class IndexedRows(nn.Module):
    """Rows picked by an input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))[index])


def graphs(batch: int, size: int) -> Inputs:
    nodes = 4 * batch + (5, 12, 19)[size]
    return torch.randn(nodes, 16), torch.randint(0, nodes, (2, 3 * nodes))


# ------------------------------------------------------------------------- arguments and results


@dataclasses.dataclass
class Found:
    """A result with names."""

    features: torch.Tensor
    score: torch.Tensor


Pair = collections.namedtuple("Pair", ["features", "score"])


class Structured(nn.Module):
    """Returns features and a score, as ``form`` likes them."""

    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.form = conv(3, 8), conv(8, 4), form

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.a(x))
        return self.form(y, self.b(y))


class Scaled(nn.Module):
    """A number among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)) * scale)


class OptionalMask(nn.Module):
    """A mask that need not be given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.relu(self.a(x))
        if mask is not None:
            y = y * mask.unsqueeze(-1)
        return self.b(y)


class NestedInputs(nn.Module):
    """A list of tensors as its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, pair: list[torch.Tensor]) -> torch.Tensor:
        return self.c(torch.relu(self.a(pair[0]) + self.b(pair[1])))


class KeywordInputs(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, *, features: torch.Tensor, context: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.c(torch.relu(self.a(features)) + torch.relu(self.b(context)))}


class CustomFloat64(nn.Module):
    """Computes in double in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x)).double()
        return self.b((y / (1 + y.sum(-1, keepdim=True))).float() * 8)


# ------------------------------------------------------------------------- parametrizations


def weight_norm() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(conv(3, 8)), nn.ReLU(), norm(conv(8, 4)))


def old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norm = torch.nn.utils.weight_norm
        return nn.Sequential(norm(conv(3, 8)), nn.ReLU(), norm(conv(8, 4)))


def spectral_norm() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(16, 16)), nn.ReLU(), norm(nn.Linear(16, 4)))


class StandardizedConv(nn.Conv2d):
    """Its weight is standardised at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight * 0.2, self.bias, self.stride, self.padding)


class CoordConv(nn.Module):
    """Coordinates beside the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(5, 8), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        y = torch.linspace(-1, 1, height).view(1, 1, -1, 1).expand(x.shape[0], 1, height, width)
        z = torch.linspace(-1, 1, width).view(1, 1, 1, -1).expand(x.shape[0], 1, height, width)
        return self.b(torch.relu(self.a(torch.cat([x, y, z], 1))))


# ------------------------------------------------------------------------- recommenders


class SmallDLRM(nn.Module):
    """Bags of categories, a dense tower, their dot products, a tower on top."""

    def __init__(self, tables: int = 3, rows_each: int = 100) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows_each, 16, mode="sum") for _ in range(tables)
        )
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, *found], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([bottom, products[:, row, column]], 1))


class Embedded(nn.Module):
    """Mean of embeddings, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(self.table(ids).mean(1))))


# ------------------------------------------------------------------------- recurrent networks


class Tagger(nn.Module):
    """A recurrent layer and a linear for each token."""

    def __init__(self, kind: type[nn.RNNBase], units: int = 24, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.rnn = kind(16, units, batch_first=True, **options)
        width = (options.get("proj_size") or units) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.table(ids))[0])


class PackedTagger(Tagger):
    """The same on sequences of different lengths, packed."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(len(ids)) % ids.shape[1] + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            self.table(ids), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(out)


class CellLoop(nn.Module):
    """A cell, stepped by hand."""

    def __init__(self, kind: type[nn.RNNCellBase], units: int = 24) -> None:
        super().__init__()
        self.cell = kind(16, units)  # type: ignore[call-arg]
        self.out = nn.Linear(units, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.out(state[0] if isinstance(state, tuple) else state)


class ConvGRU(nn.Module):
    """Convolutions over a spectrogram, then a GRU over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU())
        self.rnn, self.out = nn.GRU(16, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.conv(x).transpose(1, 2))[0])


# ------------------------------------------------------------------------- vision


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.deep = block(3, 8), block(8, 16), block(16, 16)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.mix, self.last = block(32, 8), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = conv(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        deep = self.deep(F.max_pool2d(two, 2))
        up = self.mix(torch.cat([self.up(deep), two], 1))
        return self.out(torch.cat([self.last(up), one], 1))


class Pyramid(nn.Module):
    """A feature pyramid: coarse levels added to finer ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [block(3, 8, stride=2), block(8, 16, stride=2), block(16, 32, stride=2)]
        )
        self.lateral = nn.ModuleList([conv(8, 8, 1), conv(16, 8, 1), conv(32, 8, 1)])
        self.smooth = conv(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        top = None
        found = {}
        for i in (2, 1, 0):
            side = self.lateral[i](levels[i])
            if top is not None:
                side = side + F.interpolate(top, size=side.shape[-2:], mode="nearest")
            top = side
            found[f"p{i}"] = self.smooth(side)
        return found


class SqueezeExcite(nn.Module):
    """An inverted residual with squeeze and excitation, as in MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 8)
        self.wide = nn.Sequential(conv(8, 24, 1), nn.BatchNorm2d(24), nn.Hardswish())
        self.depth = nn.Sequential(conv(24, 24, groups=24), nn.BatchNorm2d(24), nn.Hardswish())
        self.down, self.up = nn.Conv2d(24, 8, 1), nn.Conv2d(8, 24, 1)
        self.narrow = nn.Sequential(conv(24, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.depth(self.wide(x))
        gate = F.hardsigmoid(self.up(torch.relu(self.down(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.narrow(y * gate)


class PixelShuffled(nn.Module):
    """Super resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = block(3, 16), conv(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pixel_shuffle(self.b(self.a(x)), 2)


class Shuffled(nn.Module):
    """Channel shuffle with views, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = block(3, 16), conv(8, 8, groups=8), conv(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.a(x).chunk(2, 1)
        y = torch.cat([left, torch.relu(self.b(right))], 1)
        n, c, h, w = y.shape
        return self.c(y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


class NoiseNet(nn.Module):
    """A small diffusion U-Net: time embedding, group norm, SiLU, attention at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.into, self.norm1, self.conv1 = conv(3, 16), nn.GroupNorm(4, 16), conv(16, 16)
        self.down, self.norm2 = conv(16, 16, stride=2), nn.GroupNorm(4, 16)
        self.to_qkv, self.to_out = nn.Conv2d(16, 48, 1), nn.Conv2d(16, 16, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 16, 2, stride=2), conv(32, 3)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * torch.exp(torch.arange(8) * (-math.log(1000) / 8))
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.into(x)
        skip = x + self.conv1(F.silu(self.norm1(x))) + embedded[:, :, None, None]
        y = self.down(skip)
        q, k, v = self.to_qkv(self.norm2(y)).flatten(2).chunk(3, 1)
        scores = torch.softmax(q.transpose(1, 2) @ k / 4, -1)
        y = y + self.to_out((v @ scores.transpose(1, 2)).view_as(y))
        return self.out(torch.cat([self.up(y), skip], 1))


class Variational(nn.Module):
    """An autoencoder that draws its code around a mean; the noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.mean, self.log, self.decode = nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.encode(x)
        mean, log = self.mean(y), self.log(y)
        return self.decode(mean + noise * torch.exp(log / 2)), mean


# ------------------------------------------------------------------------- signals


class CausalBlock(nn.Module):
    """A dilated causal convolution with a residual, as in TCNs and WaveNet."""

    def __init__(self, dilation: int, gated: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16 if gated else 8, 3, dilation=dilation)
        self.mix, self.pad, self.gated = nn.Conv1d(8, 8, 1), 2 * dilation, gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(F.pad(x, (self.pad, 0)))
        y = F.glu(y, 1) if self.gated else torch.relu(y)
        return x + self.mix(y)


def causal(gated: bool) -> nn.Module:
    return nn.Sequential(*(CausalBlock(2**i, gated) for i in range(3)), nn.Conv1d(8, 4, 1))


# ------------------------------------------------------------------------- transformers


class OwnAttention(nn.Module):
    """Attention as people write it: one linear for queries, keys and values, an einsum."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.einsum("bhqc,bhkc->bhqk", q, k) * (c // self.heads) ** -0.5
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class OwnTransformer(nn.Module):
    """Two pre-norm blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.attend = nn.ModuleList(OwnAttention() for _ in range(2))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for i in range(2):
            x = x + self.attend[i](self.norms[2 * i](x))
            x = x + self.feed[i](self.norms[2 * i + 1](x))
        return x


class SmallViT(nn.Module):
    """Patches by a convolution, then torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, stride=8)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Masked(nn.Module):
    """torch's encoder with a padding mask among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        out = self.encoder(x, src_key_padding_mask=padding)
        return out.masked_fill(padding[..., None], 0.0)


class WithReadWeights(nn.Module):
    """Layer norm, and a linear whose weight is read and never called, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(self.norm(x), self.qkv.weight, self.qkv.bias).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class MixerBlock(nn.Module):
    """MLPs across tokens and across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm1, self.norm2 = (
            nn.Conv2d(3, 16, 8, 8),
            nn.LayerNorm(16),
            nn.LayerNorm(16),
        )
        self.across = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.within = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


def seeded_rows(batch: int, size: int) -> Inputs:
    return torch.randn(batch, 16), torch.randint(0, 2, (batch, 16)).bool()


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def residual_mlp() -> nn.Module:
    body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
    return Body(lambda self, x: self.out(x + self.body(x)), body=body, out=nn.Linear(16, 4))


def video() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def unflattened() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 8 * 16), nn.ReLU(), nn.Unflatten(1, (8, 4, 4)),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
    )  # fmt: skip


def unfolded() -> nn.Module:
    return Body(
        lambda self, x: self.b(torch.relu(self.a(self.fold(x).transpose(1, 2)))),
        fold=nn.Unfold(8, stride=8), a=nn.Linear(192, 32), b=nn.Linear(32, 4),
    )  # fmt: skip


def instance_normed() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8), nn.ReLU(), conv(8, 4))


def untracked() -> nn.Module:
    return nn.Sequential(
        conv(3, 8), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU(), conv(8, 4)
    )


def mask_and_rows(batch: int, size: int) -> Inputs:
    length = (5, 12, 19)[size]
    padding = torch.arange(length)[None] >= torch.randint(2, length + 1, (batch, 1))
    return torch.randn(batch, length, 16), padding


def optional_mask(batch: int, size: int) -> Inputs:
    length = (5, 12, 19)[size]
    return {"x": torch.randn(batch, length, 16), "mask": torch.rand(batch, length).round()}


# ------------------------------------------------------------------------- seldom seen


class Fourier(Clamped):
    """A filter in the frequency domain between two convolutions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        waves = torch.fft.rfft2(y)
        return self.b(torch.fft.irfft2(waves * torch.exp(-waves.abs() / 10), s=y.shape[-2:]))


class ComplexTurn(nn.Module):
    """Pairs of features turned as complex numbers, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("turns", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(self.a(x).reshape(-1, 8, 2)) * self.turns
        return self.b(torch.view_as_real(turned).flatten(1))


class SortedAndTop(nn.Module):
    """Fields of the named tuples that sort and topk return, and a norm that has ``out=None``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.a(x)
        top, order = y.topk(3, dim=1).values, x.sort(1).indices
        return F.normalize(self.b(top), dim=-1), self.b(y.gather(1, order))


class PackedLinears(nn.Module):
    """Layers on the data of a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: nn.utils.rnn.PackedSequence) -> nn.utils.rnn.PackedSequence:
        return nn.utils.rnn.PackedSequence(self.b(torch.relu(self.a(x.data))), x.batch_sizes)


def packed_rows(batch: int, size: int) -> Inputs:
    length = (9, 12, 19)[size]
    return (nn.utils.rnn.pack_sequence([torch.randn(length - i, 16) for i in range(batch)]),)


class HeadByNumber(nn.Module):
    """Its second argument says which head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.heads = conv(3, 8), nn.ModuleList([conv(8, 4), conv(8, 4)])

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.heads[number](torch.relu(self.a(x)))


class ListOfImages(nn.Module):
    """Images of any number, each of its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 4)

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.b(torch.relu(self.a(x[None])))[0] for x in images]


ONE = (1,)  #: for models of one input size

PATTERNS: tuple[Animal, ...] = (
    Animal("in_place_clamp", ClampInPlace, images()),
    Animal("in_place_functional_relu", FunctionalReluInPlace, images()),
    Animal("in_place_module_relu", ModuleReluInPlace, images()),
    Animal("in_place_relu_", ReluUnderscore, images()),
    Animal("in_place_masked_fill", MaskedFill, images()),
    Animal("in_place_mul_add", MulAdd, images()),
    Animal("in_place_on_a_slice", SliceZeroed, images()),
    Animal("in_place_set_item", SetItem, images()),
    Animal("in_place_alias", Augmented, images()),
    Animal("in_place_buffer", CopiedIntoBuffer, rows(), sizes=ONE),
    Animal("forward_hook", with_forward_hook, images()),
    Animal("pre_hook_on_the_model", with_pre_hook, images()),
    Animal("branch_on_batch", BatchBranch, images()),
    Animal("branch_on_size", SizeBranch, images()),
    Animal("branch_on_values", ValueBranch, images()),
    Animal("interpolate_in_dict", lambda: Interpolated(dict), images()),
    Animal(
        "interpolate_in_ordered_dict",
        lambda: Interpolated(collections.OrderedDict),
        images(),
    ),
    Animal("loop_over_samples", ScriptedLoop, rows(), sizes=ONE),
    Animal("shared_head", SharedHead, images()),
    Animal("recurrent_linear", RecurrentLinear, rows(), sizes=ONE),
    Animal("layer_called_twice", CalledTwice, images()),
    Animal("tied_linears", TiedLinears, rows(), sizes=ONE),
    Animal("tied_embedding", TiedEmbedding, tokens()),
    Animal("glu_by_hand", GluByHand, images()),
    Animal("yolo_head", YoloHead, images()),
    Animal("unrolled_lstm", UnrolledLSTM, sequences()),
    Animal("sliced_excitation", Hardsigmoided, images()),
    Animal("boolean_mask", BooleanMask, images()),
    Animal("where_with_mask_input", WhereMask, seeded_rows, sizes=ONE),
    Animal(
        "one_hot",
        OneHot,
        lambda batch, size: (torch.randn(batch, 16), torch.randint(0, 10, (batch,))),
        sizes=ONE,
    ),
    # Sums over random neighbours have long tails, which a few graphs do not show.
    Animal("graph_network", GraphNetwork, graphs, bound=14.0),
    Animal(
        "scatter_and_gather",
        ScatterGather,
        lambda batch, size: (torch.randn(batch, 16), torch.randint(0, 4, (batch,))),
        sizes=ONE,
    ),
    Animal(
        "indexed_rows",
        IndexedRows,
        lambda batch, size: (torch.randn(batch, 16), torch.randint(0, batch, (batch,))),
        sizes=ONE,
    ),
    Animal("dataclass_output", lambda: Structured(Found), images()),
    Animal("named_tuple_output", lambda: Structured(Pair), images()),
    Animal("nested_output", lambda: Structured(lambda y, z: {"all": [y, (z,)]}), images()),
    Animal("scalar_argument", Scaled, lambda b, s: {"x": images()(b, s)[0], "scale": 0.5}),
    Animal("optional_mask", OptionalMask, optional_mask),
    Animal(
        "list_argument",
        NestedInputs,
        lambda batch, size: ([torch.randn(batch, 16), torch.randn(batch, 16)],),
        sizes=ONE,
    ),
    Animal(
        "keyword_inputs",
        KeywordInputs,
        lambda batch, size: {"features": torch.randn(batch, 16), "context": torch.randn(batch, 8)},
        sizes=ONE,
    ),
    Animal("double_in_between", CustomFloat64, rows(), sizes=ONE),
    Animal("weight_norm", weight_norm, images()),
    Animal("old_weight_norm", old_weight_norm, images()),
    Animal("spectral_norm", spectral_norm, rows(), sizes=ONE),
    Animal(
        "weight_standardised",
        lambda: nn.Sequential(StandardizedConv(3, 8, 3), nn.ReLU(), conv(8, 4)),
        images(),
    ),
    Animal("coord_conv", CoordConv, images()),
    Animal(
        "dlrm",
        SmallDLRM,
        lambda batch, size: (torch.randn(batch, 13), torch.randint(0, 100, (batch, 3, 2))),
        bound=15.0,  # one number out of products of sums, whose tails are long
        sizes=ONE,
    ),
    Animal("embedding_classifier", Embedded, tokens()),
    Animal("lstm_tagger", lambda: Tagger(nn.LSTM), tokens()),
    Animal(
        "deep_bidirectional_lstm",
        lambda: Tagger(nn.LSTM, num_layers=2, bidirectional=True),
        tokens(),
    ),
    Animal("projected_lstm", lambda: Tagger(nn.LSTM, proj_size=12), tokens()),
    Animal("gru_tagger", lambda: Tagger(nn.GRU), tokens()),
    Animal(
        "deep_bidirectional_gru", lambda: Tagger(nn.GRU, num_layers=2, bidirectional=True), tokens()
    ),
    Animal("wide_lstm_tagger", lambda: Tagger(nn.LSTM, 256), tokens()),
    Animal("wide_packed_gru", lambda: PackedTagger(nn.GRU, 256), tokens()),
    Animal("wide_lstm_cell", lambda: CellLoop(nn.LSTMCell, 256), sequences()),
    Animal("rnn_tagger", lambda: Tagger(nn.RNN), tokens()),
    Animal("packed_lstm", lambda: PackedTagger(nn.LSTM), tokens()),
    Animal("packed_gru", lambda: PackedTagger(nn.GRU, bidirectional=True), tokens()),
    Animal("lstm_cell", lambda: CellLoop(nn.LSTMCell), sequences()),
    Animal("gru_cell", lambda: CellLoop(nn.GRUCell), sequences()),
    Animal("conv_gru", ConvGRU, signals()),
    Animal("unet", UNet, images()),
    Animal("feature_pyramid", Pyramid, images()),
    Animal("squeeze_excite", SqueezeExcite, images()),
    Animal("super_resolution", PixelShuffled, images()),
    Animal("channel_shuffle", Shuffled, images()),
    Animal(
        "diffusion_unet",
        NoiseNet,
        lambda batch, size: (*images()(batch, size), torch.rand(batch) * 1000),
    ),
    Animal(
        "variational",
        Variational,
        lambda batch, size: (torch.randn(batch, 16), torch.randn(batch, 8)),
        sizes=ONE,
    ),
    Animal("tcn", lambda: causal(False), signals()),
    Animal("wavenet", lambda: causal(True), signals()),
    Animal("own_transformer", OwnTransformer, sequences()),
    Animal("small_vit", SmallViT, images()),
    Animal("encoder_with_padding", Masked, mask_and_rows),
    Animal("read_weights", WithReadWeights, sequences()),
    Animal("mlp_mixer", MixerBlock, images(sizes=(32, 32, 32)), sizes=ONE),
    Animal("perceptron", perceptron, rows(), sizes=ONE),
    Animal("residual_mlp", residual_mlp, rows(), sizes=ONE),
    Animal(
        "video",
        video,
        lambda batch, size: (torch.randn(batch, 3, 4, (8, 12, 16)[size], (8, 12, 16)[size]),),
    ),
    Animal("unflatten_decoder", unflattened, rows(), sizes=ONE),
    Animal("unfold_patches", unfolded, images()),
    Animal("instance_norm", instance_normed, images()),
    Animal("batch_norm_without_statistics", untracked, images()),
    Animal("fourier", Fourier, images(sizes=(12, 16, 20))),
    Animal("complex_turn", ComplexTurn, rows(), sizes=ONE),
    Animal("sorted_and_top", SortedAndTop, sequences()),
    Animal("packed_linears", PackedLinears, packed_rows),
    Animal(
        "head_by_number",
        HeadByNumber,
        lambda batch, size: (torch.randn(batch, 3, 12, 12), size % 2),
    ),
    Animal(
        "list_of_images",
        ListOfImages,
        lambda batch, size: ([torch.randn(3, 8 + 4 * i, 8 + 4 * i) for i in range(batch)],),
        sizes=ONE,
    ),
)
