"""Export a small CNN, serve it from C++, and hold its answers against Python's.

    python examples/cpp/client.py

Builds server.cpp with the C++ compiler at hand, starts it on a free port, asks it, and stops it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import torch
from torch import nn

import x86quant

HERE = Path(__file__).parent


def build(folder: Path) -> Path:
    """The server, compiled."""
    paths = x86quant.cpp_paths()
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-O1", "-Wall", "-Wextra", "-pthread", *shlex.split(paths.cflags)]
    target = folder / "server"
    command = [*compiler, *flags, str(HERE / "server.cpp"), *shlex.split(paths.libs), "-o"]
    subprocess.run([*command, str(target)], check=True)
    return target


def ask(address: str, x: torch.Tensor) -> torch.Tensor:
    """The server's answer for ``x``."""
    shape = ",".join(map(str, x.shape))
    request = urllib.request.Request(f"{address}/run", x.numpy().tobytes(), {"X-Shape": shape})
    with urllib.request.urlopen(request, timeout=30) as answer:
        sizes = [int(size) for size in answer.headers["X-Shape"].split(",")]
        values = np.frombuffer(answer.read(), np.float32).copy()
    return torch.from_numpy(values).reshape(sizes)


def model() -> tuple[nn.Module, torch.Tensor]:
    """A quantized network and an input."""
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()
    x = torch.randn(8, 3, 32, 32)
    return x86quant.quantize(net, [x], speed_check=False, progress=False), x


def main() -> None:
    """Export, serve, compare."""
    int8, x = model()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "model.xq"
        x86quant.export_program(int8, program, [x[:1], x])  # batches of 1 and of 8
        command = [str(build(Path(folder))), str(program), "--port", "0", "--threads", "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            print("health:", urllib.request.urlopen(f"{address}/health").read().decode().strip())
            for batch in (x[:1], x):
                same = torch.equal(ask(address, batch), int8(batch))
                print(f"batch of {len(batch)}: the answers of C++ and Python are equal: {same}")
            server.send_signal(signal.SIGTERM)
            print("exit status:", server.wait(timeout=30))


if __name__ == "__main__":
    main()
