"""Artifacts against ``torch.save`` of the float model: size, and time to load.

    python -m benchmarks.artifacts [--networks resnet18 resnet50 mobilenet_v2]

Both files are read from a warm page cache, in turn. The first run of the loaded int8 model, which
packs its weights, is given apart.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import x86quant
from benchmarks.environment import print_environment
from benchmarks.networks import torchvision_model

_ROUNDS = 9
_SIZE = 224


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet50", "mobilenet_v2"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # stock PyTorch's own
    print_environment()
    print(
        f"{'network':<16}{'fp32 MB':>9}{'int8 MB':>9}{'ratio':>7}"
        f"{'fp32 load ms':>14}{'int8 load ms':>14}{'first run ms':>14}"
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name in options.networks:
            print(_row(name, Path(folder)), flush=True)


def _row(name: str, folder: Path) -> str:
    model = torchvision_model(name)
    x = torch.randn(1, 3, _SIZE, _SIZE).contiguous(memory_format=torch.channels_last)
    compiled = x86quant.compile(converted(model, x), (x,))
    float_file, int8_file = folder / "fp32.pt", folder / "int8.x86q"
    torch.save(model, float_file)
    x86quant.save(compiled, int8_file)
    loaded = x86quant.load(int8_file)
    first = _ms(lambda: loaded(x))
    assert torch.equal(loaded(x), compiled(x)), f"{name}: the loaded model gives other results"
    float_ms, int8_ms = [], []
    for _ in range(_ROUNDS):
        float_ms.append(_ms(lambda: torch.load(float_file, weights_only=False)))
        int8_ms.append(_ms(lambda: x86quant.load(int8_file)))
    sizes = [file.stat().st_size / 1e6 for file in (float_file, int8_file)]
    return (
        f"{name:<16}{sizes[0]:>9.1f}{sizes[1]:>9.1f}{sizes[0] / sizes[1]:>7.2f}"
        f"{statistics.median(float_ms):>14.1f}{statistics.median(int8_ms):>14.1f}{first:>14.1f}"
    )


def converted(model: torch.nn.Module, x: torch.Tensor) -> torch.nn.Module:
    """``model`` through the stock workflow, on one input, without the care of ``quantize``."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "onednn"
    try:
        prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
        prepared(x)
        return convert_fx(prepared)
    finally:
        torch.backends.quantized.engine = before


def _ms(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
