"""One artifact gives the same bytes at every level, on every vendor's CPU, and in plain torch.

``data/same_answers.safetensors`` holds a network with one layer of each kind, with weights over
all of int8; the answers below were computed once. Its inputs are exact in float, and between
quantizing them and reading the result there are only integers and their requantization, which
rounds one float product a value. ``python -m tests.artifacts.test_same_answers`` makes both anew,
which is needed only if the network changes.

Layers that quantize each row as it comes, and embedding tables, give the same bytes too. Models
that hold float ops, recurrent layers and attention are bounded, as ``docs/numerics.md`` says.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

import x86quant
from tests import isa
from x86quant.dynamic.recurrent import DynamicGRU, DynamicLSTM

DATA = Path(__file__).parents[1] / "data"
ARTIFACT = DATA / "same_answers.safetensors"
ANSWERS = "411892108afec42bbe874e7194fafa2b92a3f6a647263d5120ad72358624a951"
# Two layers with float ops between them: its first results, and a step of its output.
WITH_FLOAT = DATA / "close_answers.safetensors"
CLOSE = [
    5.25157642,
    -6.30189180,
    5.93428135,
    3.83365083,
    4.30629253,
    -5.04151344,
    4.72641897,
    2.94088268,
]
STEP = 0.0525157638


# Linears behind bags in 4 bits.
ROWS = "eb770c801b2f22994311ef316678cf21cbd74c9ef4d6d6d5983ee503e3a80b8c"
# The first results of a recurrent model, and of an encoder whose layer is one fused graph.
ENCODER = DATA / "encoder_answers.safetensors"
RECURRENT = [
    -0.08401392,
    0.02060683,
    0.07913268,
    -0.10298405,
    0.02495463,
    0.10665315,
    0.08223877,
    -0.08734141,
]
ENCODED = [
    0.13898270,
    0.06736174,
    0.16867349,
    0.36446199,
    -0.08050580,
    -0.09708245,
    0.16589886,
    -0.03363597,
]


class Rows(nn.Module):
    """Two embedding bags, and linears that quantize each row."""

    def __init__(self) -> None:
        super().__init__()
        self.summed = nn.EmbeddingBag(40, 16, mode="sum")
        self.mean = nn.EmbeddingBag(30, 16, mode="mean")
        self.head = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 24))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        bags = [self.summed(indices), self.mean(indices[:, :3] % 30)]
        return self.head(torch.cat(bags, 1))


class Recurrent(nn.Module):
    """Two layers of LSTM in both directions, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = DynamicLSTM.from_float(exact(nn.LSTM(16, 24, 2, bidirectional=True)))
        self.gru = DynamicGRU.from_float(exact(nn.GRU(48, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0]


_Module = TypeVar("_Module", bound=nn.Module)


def exact(module: _Module) -> _Module:
    """The module with weights that are multiples of 1/256, the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    for weight in module.parameters():
        weight.data = torch.randint(-64, 65, weight.shape, generator=generator) / 256
    return module


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()


def of_rows() -> torch.Tensor:
    model = x86quant.to_dynamic(exact(Rows()).eval(), embeddings=4)
    assert isinstance(model.head[0], x86quant.DynamicLinear)
    return model(torch.arange(40).view(8, 5))


def of_recurrent() -> torch.Tensor:
    return Recurrent()(inputs().flatten()[: 9 * 2 * 16].view(9, 2, 16))


def of_encoder() -> torch.Tensor:
    return x86quant.load(ENCODER, model=encoder())(inputs().flatten()[: 2 * 9 * 32].view(2, 9, 32))


class Net(nn.Module):
    """A layer of each kind: dense, strided, depthwise, grouped, pointwise, a sum, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, 1, 1, groups=16)
        self.grouped = nn.Conv2d(16, 16, 3, 1, 1, groups=4)
        self.dense = nn.Conv2d(16, 32, 3, 1, 1)
        self.pointwise = nn.Conv2d(32, 16, 1)
        self.act = nn.Hardswish()
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        y = self.act(self.depthwise(x))
        y = torch.relu(self.grouped(y)) + x
        y = torch.relu(self.dense(y))
        y = self.act(self.pointwise(y))
        y = torch.flatten(nn.functional.adaptive_avg_pool2d(y, 1), 1)
        return self.head(y)


class FloatAmid(nn.Module):
    """Two convolutions, and between them ops that torch runs in float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.head = nn.Conv2d(16, 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cos(torch.relu(self.stem(x))).cumsum(1)
        return self.head(x).flatten(1)


def inputs() -> torch.Tensor:
    """Multiples of 1/16, exact in float."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-48, 49, (5, 3, 20, 20), generator=generator) / 16


def digest(result: torch.Tensor) -> str:
    return hashlib.sha256(result.detach().contiguous().numpy().tobytes()).hexdigest()


ONE_RUN = """
import torch, x86quant
from tests.artifacts.test_same_answers import (
    ARTIFACT, WITH_FLOAT, digest, inputs, of_encoder, of_recurrent, of_rows
)
module = x86quant.load(ARTIFACT)
with torch.no_grad():
    for threads in (1, 2):
        torch.set_num_threads(threads)
        result = module(inputs())
        assert torch.equal(module(inputs()[:1]), result[:1])
        print(x86quant.cpu().isa, digest(result))
    print(digest(of_rows()))
    for result in (x86quant.load(WITH_FLOAT)(inputs()), of_recurrent(), of_encoder()):
        print(*result.flatten()[:8].tolist())
"""


@pytest.mark.parametrize("level", isa.LEVELS)
def test_every_level_gives_the_same_bytes(level: str) -> None:
    if not isa.has(level):
        pytest.skip(f"this CPU has no {level}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ONE_RUN],
        env={**isa.environment(level), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=600,  # emulated CPUs are slow
    )
    assert done.returncode == 0, done.stderr
    one_thread, two_threads, rows, *close = done.stdout.splitlines()
    assert one_thread.split() == two_threads.split() == [level, ANSWERS]
    assert rows == ROWS
    amid, recurrent, encoded = ([float(x) for x in line.split()] for line in close)
    # A code behind a float op may be the next one, which moves the result by a step at most here.
    assert amid == pytest.approx(CLOSE, abs=1.01 * STEP)
    # Sigmoid, tanh and the sums of the state are float: codes of the next step may be others.
    assert recurrent == pytest.approx(RECURRENT, abs=0.002)
    # Attention multiplies in float, on AMX in bfloat16, and norms sum up in float.
    assert encoded == pytest.approx(ENCODED, abs=0.005)


def test_plain_torch_gives_the_same_bytes() -> None:
    module = x86quant.load(ARTIFACT)
    with torch.no_grad():
        assert digest(module.graph_module(inputs())) == ANSWERS


def make() -> None:
    """Write the artifacts, and print their answers."""
    DATA.mkdir(exist_ok=True)
    for net, path in ((Net(), ARTIFACT), (FloatAmid(), WITH_FLOAT)):
        module = x86quant.quantize(net.eval(), [inputs()], progress=False)
        x86quant.save(module, path)
        with torch.no_grad():
            result = x86quant.load(path).graph_module(inputs())
        steps = result.flatten().unique().diff()
        print(path.name, digest(result), result.flatten()[:8].tolist(), float(steps.min()))

    batches = [inputs().flatten()[: 2 * 9 * 32].view(2, 9, 32)]
    fused = x86quant.quantize(
        exact(encoder()), batches, fuse_blocks=True, speed_check=False, progress=False
    )
    x86quant.save(fused, ENCODER)
    with torch.no_grad():
        print("rows", digest(of_rows()))
        print("recurrent", of_recurrent().flatten()[:8].tolist())
        print("encoded", of_encoder().flatten()[:8].tolist())


if __name__ == "__main__":
    torch.manual_seed(0)
    make()
