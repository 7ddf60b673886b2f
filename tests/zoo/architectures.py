"""Architectures, small and in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.zoo.cases import Inputs
from tests.zoo.inputs import Body, block, conv

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
