"""Int8 models under ``torch.compile``, beside themselves without it.

python -m benchmarks.compiled_calls

Each is compiled as one graph (``fullgraph=True``), by Inductor and by our own back end, and takes
turns with plain calls of the same model. Small models show what a compiled call costs.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.dynamic_linear import decibels
from benchmarks.environment import print_environment
from x86quant.bench.turns import measure_in_turn
from x86quant.torchvision_import import import_torchvision

import_torchvision()


def mlp(rows: int, size: int) -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size), nn.LayerNorm(size))
    return nn.Sequential(*layers), torch.randn(rows, size)


def encoder(tokens: int, size: int) -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(size, size // 64, 4 * size, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, tokens, size)


def network(pixels: int) -> tuple[nn.Module, torch.Tensor]:
    found: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        found += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return nn.Sequential(*found, *head), torch.randn(1, 3, pixels, pixels)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp 256, 16 rows": lambda: mlp(16, 256),
    "mlp 768, 128 rows": lambda: mlp(128, 768),
    "encoder 256, 32 tokens": lambda: encoder(32, 256),
    "encoder 768, 128 tokens": lambda: encoder(128, 768),
    "convolutions, 64 pixels": lambda: network(64),
    "convolutions, 224 pixels": lambda: network(224),
}


def forms(model: nn.Module, x: torch.Tensor) -> dict[str, nn.Module]:
    """``model`` in int8, by each way that makes other modules of it."""
    found = {"to_dynamic": x86quant.to_dynamic(model)}
    options: dict[str, Any] = {"speed_check": False, "progress": False}
    convolves = any(isinstance(m, nn.Conv2d) for m in model.modules())
    if not convolves:
        options |= {"mode": "dynamic", "fuse_blocks": True}
    found["quantize"] = x86quant.quantize(model, [x, x + 0.1], **options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    print_environment()
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, x = make()
        with torch.no_grad():
            for form, int8 in forms(model.eval(), x).items():
                print(f"{name:<26}{form:<12}{compared(int8, x, given.rounds)}", flush=True)


def compared(model: nn.Module, x: torch.Tensor, rounds: int) -> str:
    runs: dict[str, Callable[[], Any]] = {"plain": lambda: model(x)}
    for backend in ("inductor", "x86quant"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        # What Inductor computes between int8 layers may fall to the next code.
        assert decibels(compiled(x), model(x)) > 40
        runs[backend] = lambda compiled=compiled: compiled(x)
    seconds = measure_in_turn(runs, rounds)
    plain = statistics.median(seconds["plain"])
    ratios = (f"{k} {statistics.median(s) / plain:5.2f} x" for k, s in seconds.items())
    return f"{plain * 1e6:9.0f} µs  " + ", ".join([*ratios][1:])


if __name__ == "__main__":
    main()
