"""Tiny models and helpers that tests share. Every model is made from a fixed seed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx
from torch.nn import functional

import x86quant
from x86quant.torchvision_import import import_torchvision


def rows(count: int = 8, seed: int = 0) -> torch.Tensor:
    """Random rows of 16 numbers."""
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def quantized(model: nn.Module, data: Any, **settings: Any) -> Any:
    """``model`` in int8, whatever that does to its speed."""
    torch.manual_seed(0)
    return x86quant.quantize(model.eval(), data, speed_check=False, progress=False, **settings)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and inputs for it."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]


class Residual(nn.Module):
    """conv-bn-relu twice, added to the input, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.classify = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.second(self.first(x)) + x)
        return self.classify(x.mean((2, 3)))


class TwoLinears(nn.Module):
    """Two layers by name, and a ReLU that is a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(functional.relu(self.a(x)))


class Functional(nn.Module):
    """Functional conv, transposed conv and linear, and activations as functions.

    Stock lowering only takes stride, padding and the like by position and as lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.randn(8, 4, 3, 3) / 6)
        self.up = nn.Parameter(torch.randn(8, 8, 3, 3) / 6)
        self.linear = nn.Parameter(torch.randn(5, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.conv2d(x, self.conv, None, [1, 1], [1, 1], [1, 1], 1)
        x = functional.hardswish(x)
        x = functional.conv_transpose2d(x, self.up, None, [2, 2], [0, 0], [0, 0], 1, [1, 1])
        x = torch.sigmoid(x) * x
        return functional.linear(x.mean((2, 3)), self.linear)


class Embeddings(nn.Module):
    """An embedding bag and an embedding, added, then a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="sum")
        self.table = nn.Embedding(50, 16)
        self.linear = nn.Linear(16, 8)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.linear(self.bag(indices, offsets) + self.table(indices[:4]))


class Recurrent(nn.Module):
    """A linear, a recurrent layer (LSTM or GRU), a linear."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.recurrent = layer(16, 32)
        self.after = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.recurrent(self.before(x))[0])


class Cell(nn.Module):
    """One step of a recurrent cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.takes_pair = isinstance(cell, nn.LSTMCell)
        self.after = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cell(x)
        return self.after(h[0] if self.takes_pair else h)


def after_conv(op: nn.Module, dims: int = 2) -> Case:
    """``op`` after a conv that makes 8 channels of 6 positions a dimension."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 8, 3, padding=1)
    return Case(nn.Sequential(conv, op), (torch.randn(2, 4, *[6] * dims),))


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def conv_transpose(dims: int, channels: tuple[int, int] = (8, 8)) -> Case:
    """One transposed conv of stride 2."""
    layer = _TRANSPOSED[dims - 1](*channels, 3, stride=2, padding=1)
    return Case(nn.Sequential(layer), (torch.randn(2, channels[0], *[5] * dims),))


def _image(model: nn.Module) -> Case:
    return Case(model, (torch.randn(4, 8, 6, 6),))


_CONV = {
    "conv_bn_relu": lambda: _image(
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    ),
    "depthwise": lambda: _image(
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(), nn.Conv2d(8, 4, 1))
    ),
    "residual": lambda: _image(Residual()),
    "conv1d": lambda: after_conv(nn.ReLU(), 1),
    "conv3d": lambda: after_conv(nn.ReLU(), 3),
    "functional": lambda: Case(Functional(), (torch.randn(2, 4, 6, 6),)),
    "conv_transpose1d": lambda: conv_transpose(1),
    "conv_transpose2d": lambda: conv_transpose(2),
    "conv_transpose3d": lambda: conv_transpose(3),
}

_ELEMENTWISE = {
    "sigmoid": lambda: after_conv(nn.Sigmoid()),
    "tanh": lambda: after_conv(nn.Tanh()),
    "hardsigmoid": lambda: after_conv(nn.Hardsigmoid()),
    "hardswish": lambda: after_conv(nn.Hardswish()),
    "softmax": lambda: after_conv(nn.Softmax(1)),
    "prelu": lambda: after_conv(nn.PReLU(8)),
    "elu": lambda: after_conv(nn.ELU()),
    "layer_norm": lambda: after_conv(nn.LayerNorm(6)),
    "group_norm": lambda: after_conv(nn.GroupNorm(2, 8)),
}

_SEQUENCE = {
    "linear": lambda: Case(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), (torch.randn(20, 16),)
    ),
    "embeddings": lambda: Case(
        Embeddings(), (torch.randint(0, 50, (12,)), torch.tensor([0, 3, 6, 9]))
    ),
    "lstm": lambda: Case(Recurrent(nn.LSTM), (torch.randn(5, 2, 16),)),
    "gru": lambda: Case(Recurrent(nn.GRU), (torch.randn(5, 2, 16),)),
    "lstm_cell": lambda: Case(Cell(nn.LSTMCell(16, 32)), (torch.randn(3, 16),)),
    "gru_cell": lambda: Case(Cell(nn.GRUCell(16, 32)), (torch.randn(3, 16),)),
    "rnn_cell": lambda: Case(Cell(nn.RNNCell(16, 32)), (torch.randn(3, 16),)),
}

CASES: dict[str, Callable[[], Case]] = {**_CONV, **_ELEMENTWISE, **_SEQUENCE}


def make(name: str) -> Case:
    """The case of that name, the same at every call, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = CASES[name]()
        for module in case.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.running_mean)
    case.model.eval()
    return case


def sqnr(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to quantization noise in dB."""
    noise = (expected - actual).detach()
    return float(20 * torch.log10(expected.detach().norm() / noise.norm()))


def prepare(case: Case, mapping: object, **kwargs: object) -> nn.Module:
    """``prepare_fx`` on a copy, calibrated with the case's inputs."""
    prepared = prepare_fx(copy.deepcopy(case.model), mapping, case.inputs, **kwargs)
    prepared(*case.inputs)
    return prepared


def quantize(case: Case, mapping: object, **kwargs: object) -> nn.Module:
    """Prepare, calibrate and convert under the engine in force."""
    return convert_fx(prepare(case, mapping, **kwargs), **kwargs)


def train(case: Case, mapping: object, steps: int = 3, **kwargs: object) -> nn.Module:
    """``prepare_qat_fx`` on a copy and a few training steps towards the float model's outputs."""
    target = case.model(*case.inputs).detach()
    prepared = prepare_qat_fx(copy.deepcopy(case.model).train(), mapping, case.inputs, **kwargs)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.mse_loss(prepared(*case.inputs), target).backward()
        optimizer.step()
    return prepared.eval()


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A BERT of one layer and arguments for it; skips the test where there is no transformers."""
    import_torchvision()  # transformers imports torchvision where that is installed
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, 50, (2, 7))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
