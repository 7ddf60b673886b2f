"""Measure the kernels on a model's layers, make a table of it, and see what changed.

python examples/retune.py [seconds]

The table is installed for this user, as ``x86quant tune`` does, and used from then on.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import x86quant
from x86quant.cli import main as x86quant_command

MODEL = f"{__file__}:make_model"


def make_model() -> nn.Module:
    """What is tuned for."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)).eval()


def kernels() -> None:
    """Which kernels the rules in force choose for the model."""
    x = torch.randn(1, 8, 8, 8)
    int8 = x86quant.quantize(make_model(), [x, x + 1], speed_check=False, progress=False)
    print(x86quant.explain(int8))


def main() -> None:
    """Before, tune, after."""
    kernels()
    limit = sys.argv[1] if len(sys.argv) > 1 else "20"
    layers = ["--model", MODEL, "--shape", "1,8,8,8"]
    fixed = ["--batch", "1", "--callers", "graph", "--budget", f"{limit}s"]
    x86quant_command(["tune", *layers, *fixed])
    shipped = x86quant.cpu().isa
    tuned = f"tuned-{shipped}"
    x86quant_command(["rules", "diff", shipped, tuned, *layers, "--caller", "graph"])
    x86quant.use_rules(tuned)  # every new process finds it by itself
    kernels()


if __name__ == "__main__":
    main()
