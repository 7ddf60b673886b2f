"""Habits of writing a forward, each in a small model."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.zoo.cases import Inputs
from tests.zoo.inputs import block, conv

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
