"""Convolutions of codes whose results are floats, against float: torchao's recipe, conv and SiLU.

python -m benchmarks.unquantized_results

``X86InductorQuantizer`` gives no range to what lies between a convolution and its activation. Ours
multiplies windows of codes there; it takes turns with the float model, channels last.
"""

from __future__ import annotations

import argparse
import statistics
import warnings

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from x86quant.bench.turns import measure_in_turn
from x86quant.torchvision_import import import_torchvision

import_torchvision()

#: Channels, height and width, kernel.
SHAPES = (
    (16, 64, 3),
    (32, 56, 3),
    (64, 56, 3),
    (128, 28, 3),
    (256, 14, 3),
    (512, 7, 3),
    (64, 56, 1),
    (256, 14, 1),
)


def converted(model: nn.Module, x: torch.Tensor) -> nn.Module:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as quantizers

    quantizer = quantizers.X86InductorQuantizer()
    quantizer.set_global(quantizers.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    found: nn.Module = convert_pt2e(prepared)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print_environment()
    for channels, size, kernel in SHAPES:
        torch.manual_seed(0)
        layer = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)
        model = nn.Sequential(layer, nn.SiLU()).eval().requires_grad_(False)
        x = torch.randn(1, channels, size, size).to(memory_format=torch.channels_last)
        ours = x86quant.compile(converted(model, x), (x,))
        model = model.to(memory_format=torch.channels_last)
        runs = {"ours": lambda f=ours, x=x: f(x), "float": lambda f=model, x=x: f(x)}
        seconds = measure_in_turn(runs, given.rounds)
        times = {name: (statistics.median(s), min(s)) for name, s in seconds.items()}
        ratios = [f / o for f, o in zip(times["float"], times["ours"], strict=True)]
        print(
            f"{channels:4} channels, {size:3} x {size:<3}, {kernel} x {kernel}: ours "
            f"{times['ours'][0] * 1e6:7.0f} µs, float over ours {ratios[0]:5.2f} / {ratios[1]:5.2f}"
        )


if __name__ == "__main__":
    main()
