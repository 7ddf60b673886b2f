"""Files of every kind, as this version writes them: each release keeps its own, for ever.

    python -m tests.written_files 0.1

writes to ``tests/data/written_by/0.1``. ``tests/artifacts/test_earlier_versions.py`` reads those
files of every release. The classes here are those that some of the files need: they do not change.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import x86quant
from x86quant.tables.table_reader import read_table
from x86quant.tables.table_writer import write_table
from x86quant.tuning import measurement_files

FOLDER = Path(__file__).parent / "data" / "written_by"
RULES = Path(__file__).parents[1] / "rules"


class Convolutions(nn.Module):
    """Convolutions of each kind, two of which are concatenated, pooled, resized and gated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 5, padding=2, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.gate = nn.Conv2d(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.hardswish(self.stem(x))
        x = torch.cat([functional.relu6(self.depthwise(x)) + x, self.grouped(x)], 1)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        x = functional.interpolate(functional.max_pool2d(x, 2), scale_factor=2.0)
        return self.head(functional.silu(self.up(x)).mean((2, 3)))


class Volumes(nn.Module):
    """Convolutions over three sides, and one over one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depthwise = nn.Conv3d(2, 8, 3), nn.Conv3d(8, 8, 3, groups=8, padding=1)
        self.line = nn.Conv1d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.depthwise(functional.leaky_relu(self.conv(x), 0.1)))
        return self.line(x.mean((3, 4)))


class Branching(nn.Module):
    """A branch on a size around an encoder, and a number and an optional tensor as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.head = nn.Linear(16, 4)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        if x.shape[1] > 8:
            x = x[:, ::2]
        x = self.layer(x)
        return {"out": self.head(x), "mean": x.mean(1) if weights is None else x[:, 0] * weights}


class ByValue(nn.Module):
    """A branch on values between recurrent layers, convolutions and a linear: no graph does it."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.convs = nn.Sequential(nn.Conv1d(16, 8, 3, padding=1), nn.PReLU(), nn.Conv1d(8, 8, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.recurrent(x)[0]
        if bool(y.sum() > 0):
            y = y * 0.5
        return self.head(self.convs(y.transpose(1, 2)).mean(2))


class Recommender(nn.Module):
    """Bags of embeddings beside dense numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(2))
        self.dense, self.top = nn.Linear(4, 8), nn.Linear(24, 1)

    def forward(
        self, dense: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        found = [bag(ids) for bag, ids in zip(self.bags, (first, second), strict=True)]
        return self.top(torch.cat([functional.relu(self.dense(dense)), *found], 1))


class Layers(nn.Module):
    """An LSTM of two layers, a norm and linears."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.linears = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linears(self.norm(self.lstm(x)[0]))


class Recurrent(nn.Module):
    """A recurrent layer between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(24, 5)
        self.rnn = nn.GRU(16, 12, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(functional.relu(self.first(x)))[0])


def perceptron() -> nn.Module:
    """Linears with groups of 32 and one of another width."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 40), nn.Linear(40, 8))


def decoder() -> nn.Module:
    """A class of transformers."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32
    )
    return transformers.LlamaForCausalLM(config).eval()


@dataclasses.dataclass(frozen=True)
class Written:
    """A model, how it is quantized, the calls that are kept, and what reads it."""

    make: Callable[[], nn.Module]
    calls: Callable[[], list[tuple[torch.Tensor, ...]]]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Whether `load` is given the class.
    needs_class: bool = False
    #: Whether there is a program file of it too.
    program: bool = False


def _images() -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(2, 3, 16, 16),), (torch.randn(1, 3, 16, 16),)]


def _ids() -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(3, 4), *(torch.randint(20, (3, 5)) for _ in range(2))) for _ in range(2)]


WRITTEN = {
    "convolutions": Written(Convolutions, _images, {"mode": "static"}, program=True),
    "volumes": Written(Volumes, lambda: [(torch.randn(1, 2, 8, 8, 8),)] * 2, {"mode": "static"}),
    "branching": Written(
        Branching,
        lambda: [(torch.randn(2, 6, 16),), (torch.randn(2, 12, 16),),
                 (torch.randn(2, 6, 16), torch.randn(2, 1))],
        {"mode": "dynamic"},
    ),
    "by-value": Written(ByValue, lambda: [(torch.randn(3, 6, 8),)] * 2, needs_class=True),
    "recommender": Written(Recommender, _ids, program=True),
    "recurrent": Written(
        Recurrent, lambda: [(torch.randn(2, 5, 16),)] * 2, {"mode": "static"}, program=True
    ),
    "layers": Written(Layers, lambda: [(torch.randn(2, 5, 32),)] * 2, {"mode": "dynamic"}),
    "four-bits": Written(
        perceptron, lambda: [(torch.randn(3, 64),)] * 2, {"weight_bits": 4}, program=True
    ),
    "decoder": Written(decoder, lambda: [(torch.randint(50, (1, 7)),)] * 2),
    "decoder-four-bits": Written(
        decoder, lambda: [(torch.randint(50, (1, 7)),)] * 2, {"weight_bits": 4}
    ),
}  # fmt: skip


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors of what a model of ``WRITTEN`` returns."""
    if isinstance(result, torch.Tensor):
        return [result]
    if hasattr(result, "logits"):
        return [result.logits]
    return [result[name] for name in sorted(result)]


def write(folder: Path) -> None:
    """Write every file, and what each model answers."""
    folder.mkdir(parents=True)
    kept: dict[str, torch.Tensor] = {}
    for name, written in WRITTEN.items():
        torch.manual_seed(0)
        model, calls = written.make().eval(), written.calls()
        int8 = x86quant.quantize(
            model, calls, speed_check=False, progress=False, **written.settings
        )
        x86quant.save(int8, folder / f"{name}.x86q", metadata={"model": name})
        if written.program:
            x86quant.export_program(int8, folder / f"{name}.xq", [calls[0]])
        for number, call in enumerate(calls):
            with torch.no_grad():
                answers = flat(int8(*call))
            for part, tensors in (("in", call), ("out", answers)):
                kept.update({f"{name}.{number}.{part}.{i}": t for i, t in enumerate(tensors)})
    save_file({key: tensor.contiguous().clone() for key, tensor in kept.items()},
              folder / "answers.safetensors")  # fmt: skip
    write_table(read_table(RULES / "avx512_vnni.toml"), folder / "table.toml")
    for name in ("avx512_vnni", "embeddings"):
        measured = measurement_files.read(RULES / "measurements" / f"{name}.csv")
        some = set(list(measured.cases())[:: len(measured.cases()) // 25])
        measurement_files.write(folder / f"{name}.csv", measured.where(some.__contains__))
    shutil.copy(RULES / "errata.toml", folder)


if __name__ == "__main__":
    write(FOLDER / sys.argv[1])
