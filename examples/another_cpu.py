"""Save a model on one CPU and load it on another, here one without VNNI and AMX.

python examples/another_cpu.py

A file holds plain weights, so the CPU that loads it chooses the kernels. ``X86QUANT_ISA`` lets this
machine be a lesser one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import x86quant


def save(path: Path) -> torch.Tensor:
    """Quantize a model and save it, and return its result for ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    batches = [torch.randn(4, 3, 16, 16) for _ in range(2)]
    int8 = x86quant.quantize(model, batches, speed_check=False, progress=False)
    x86quant.save(int8, path, example_inputs=(batches[0],))
    result: torch.Tensor = int8(torch.ones(1, 3, 16, 16))
    return result


def load(path: Path) -> torch.Tensor:
    """Load the model, say which kernels run it here, and return its result for ones."""
    model = x86quant.load(path)
    result: torch.Tensor = model(torch.ones(1, 3, 16, 16))
    print(f"on {x86quant.cpu().isa}:")
    print(x86quant.explain(model))
    return result


def main() -> None:
    """Save here, load in a process that is held to AVX2, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        path, result = Path(folder) / "model.safetensors", Path(folder) / "result.pt"
        here = save(path)
        load(path)
        command = [sys.executable, __file__, str(path), str(result)]
        print(flush=True)
        subprocess.run(command, check=True, env={**os.environ, "X86QUANT_ISA": "avx2"})
        there = torch.load(result)
    step = float((here - there).abs().max())
    print(f"largest difference between the two: {step:.2g}")


if __name__ == "__main__":
    if len(sys.argv) == 3:  # the other CPU
        torch.save(load(Path(sys.argv[1])), sys.argv[2])
    else:
        main()
