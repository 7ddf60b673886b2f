"""One artifact gives the same bytes at every level, on every vendor's CPU, and in plain torch.

``data/same_answers.safetensors`` holds a network with one layer of each kind, with weights over
all of int8; the answers below were computed once. Its inputs are exact in float, and between
quantizing them and reading the result there are only integers and their requantization, which
rounds one float product a value. ``python -m tests.test_same_answers`` makes both anew, which is
needed only if the network changes.

The other tests bound what ``docs/graph.md`` says of models that hold float ops.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import x86quant
from tests import isa

DATA = Path(__file__).parent / "data"
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
from tests.test_same_answers import ARTIFACT, WITH_FLOAT, digest, inputs
module = x86quant.load(ARTIFACT)
with torch.no_grad():
    for threads in (1, 2):
        torch.set_num_threads(threads)
        result = module(inputs())
        assert torch.equal(module(inputs()[:1]), result[:1])
        print(x86quant.cpu().isa, digest(result))
    print(*x86quant.load(WITH_FLOAT)(inputs()).flatten()[:8].tolist())
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
    one_thread, two_threads, close = done.stdout.splitlines()
    assert one_thread.split() == two_threads.split() == [level, ANSWERS]
    # A code behind a float op may be the next one, which moves the result by a step at most here.
    assert [float(x) for x in close.split()] == pytest.approx(CLOSE, abs=1.01 * STEP)


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


if __name__ == "__main__":
    torch.manual_seed(0)
    make()
