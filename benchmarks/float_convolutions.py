"""Convolutions that stay in float between int8 layers: native ones, beside torch's.

    python -m benchmarks.float_convolutions [--rounds 20]

Times are of one call in ms, the least of rounds in turns, with the rounding of results to codes and
inputs with channels last, as they are there.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from benchmarks.environment import print_environment
from x86quant.compiled import CompiledModule
from x86quant.lowering.graph_tools import add_constant, emit

#: Images, channels, outputs, size, kernel, stride, groups.
_CASES = [
    (8, 16, 96, 112, 1, 1, 1),
    (8, 96, 24, 56, 1, 1, 1),
    (8, 480, 480, 22, 1, 1, 1),
    (8, 960, 160, 7, 1, 1, 1),
    (8, 3, 64, 224, 7, 2, 1),
    (8, 3, 32, 224, 3, 2, 1),
    (8, 64, 64, 56, 3, 1, 1),
    (8, 256, 256, 14, 3, 1, 1),
    (8, 512, 512, 7, 3, 1, 1),
    (1, 64, 64, 56, 3, 1, 1),
    (8, 96, 96, 112, 3, 2, 96),
    (8, 144, 144, 56, 3, 1, 144),
    (8, 384, 384, 14, 3, 1, 384),
]


_CODES = {"out_scale": 0.05, "out_zp": 0}


def natively(conv: nn.Conv2d) -> CompiledModule:
    """``conv`` and the rounding of its result to codes as one step."""
    graph, root = Graph(), nn.Module()
    x = graph.placeholder("x")
    assert conv.bias is not None
    found = emit(
        graph, "float_conv_codes", x=x,
        weight=add_constant(root, graph, "weight", conv.weight.detach()),
        bias=add_constant(root, graph, "bias", conv.bias.detach()),
        stride=list(conv.stride), padding=list(conv.padding), dilation=list(conv.dilation),
        groups=conv.groups, functions=[], numbers=[], **_CODES,
    )  # fmt: skip
    graph.output((found,))
    return CompiledModule(GraphModule(root, graph))


def by_torch(conv: nn.Conv2d) -> CompiledModule:
    """torch's ``conv``, behind which a native step rounds."""
    graph, root = Graph(), nn.Module()
    root.conv = conv
    found = emit(
        graph, "quantize", x=graph.call_module("conv", (graph.placeholder("x"),)), **_CODES
    )
    graph.output((found,))
    return CompiledModule(GraphModule(root, graph))


def main() -> None:
    """Print a row a convolution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print_environment()
    print("\n| convolution | torch | x86quant | ratio | GFLOPS |\n|---|---|---|---|---|")
    torch.set_grad_enabled(False)
    for images, channels, outputs, size, kernel, stride, groups in _CASES:
        conv = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups).eval()
        conv = conv.to(memory_format=torch.channels_last)
        x = torch.randn(images, channels, size, size).to(memory_format=torch.channels_last)
        runs = [by_torch(conv), natively(conv)]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for run, taken in zip(runs, times, strict=True):
                start = time.perf_counter()
                run(x)
                taken.append(1e3 * (time.perf_counter() - start))
        theirs, own = map(min, times)
        products = conv(x).numel() * channels // groups * kernel**2
        name = f"{images}x{channels}x{size}x{size} to {outputs}, {kernel}x{kernel}"
        name += f", stride {stride}" * (stride > 1) + ", depthwise" * (groups > 1)
        gflops = 2e-6 * products / own
        print(f"| {name} | {theirs:.2f} | {own:.2f} | {theirs / own:.2f} | {gflops:.0f} |")


if __name__ == "__main__":
    main()
