"""What packing the weights of networks takes, each layer for the kernel that the router chose.

    python -m benchmarks.packing [--networks resnet50 bert_base] [--rounds 5] [--layers 5]

Milliseconds by median and minimum, and per million weights by minimum, on one thread, with the
layers that take longest; then of all layers where torch has ``--threads`` threads, which share
each layer's blocks of output channels. Cap the level by ``X86QUANT_ISA``. Convolutional networks
are static; of BERT-base, which is dynamic, it is the rows' linears, all on the native kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import x86quant
from benchmarks.artifacts import converted
from benchmarks.environment import print_environment
from benchmarks.networks import torchvision_model
from x86quant import extension
from x86quant.bench.subjects import subject
from x86quant.packing.linear_dynamic import Weights
from x86quant.runtime.programs import LayerWeights, Programs

_SIZE = 224


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer that is packed when a network runs.

    Attributes:
        what: its weight's shape and the kernel.
        weights: how many it has.
        pack: packs it again.
    """

    what: str
    weights: int
    pack: Callable[[], object]


def layers(name: str) -> list[Layer]:
    """The layers of the network that are packed for one image."""
    x = torch.randn(1, 3, _SIZE, _SIZE).contiguous(memory_format=torch.channels_last)
    pack = Programs.pack
    packed: list[Layer] = []

    def remembering(self: Programs, kernel: str, layer: LayerWeights) -> Any:
        what = f"{tuple(layer.weight.shape)} {kernel}"
        packed.append(Layer(what, layer.weight.numel(), lambda: Programs().pack(kernel, layer)))
        return pack(self, kernel, layer)

    with mock.patch.object(Programs, "pack", remembering):
        x86quant.compile(converted(torchvision_model(name), x), (x,))(x)
    return packed


def row_layers() -> list[Layer]:
    """The linears of BERT-base."""
    make = Programs.row_linear
    packed: list[Layer] = []

    def remembering(self: Programs, weights: Weights, activation: str | None) -> Any:
        def again() -> object:  # past what remembers packs
            return extension.native().pack_row_linear(*weights, activation, [0, 0])

        what = f"{tuple(weights[0].shape)} rows"
        packed.append(Layer(what, weights[0].numel(), again))
        return make(self, weights, activation)

    bert = subject("bert-base")
    call = bert.arguments(seed=0)
    with mock.patch.object(Programs, "row_linear", remembering):
        model = x86quant.quantize(
            bert.model(), [call.args or call.kwargs], mode="dynamic", fuse_blocks=True,
            speed_check=False, progress=False,
        )  # fmt: skip
        packed.clear()  # trials of parts
        x86quant.reroute(model)  # so that the next call packs
        model(*call.args, **call.kwargs)
    return packed


def times(layer: Layer, rounds: int) -> list[float]:
    """Milliseconds of packing one layer."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        layer.pack()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def in_turn(packed: list[Layer], threads: int, rounds: int) -> list[float]:
    """Milliseconds of packing all layers one after another, each by so many threads."""
    taken = []
    torch.set_num_threads(threads)
    for _ in range(rounds):
        start = time.perf_counter()
        for layer in packed:
            layer.pack()
        taken.append((time.perf_counter() - start) * 1e3)
    torch.set_num_threads(1)
    return taken


def print_network(name: str, rounds: int, most: int, threads: int) -> None:
    """Lines of the table."""
    packed = row_layers() if name == "bert_base" else layers(name)
    taken = [times(layer, rounds) for layer in packed]
    weights = sum(layer.weights for layer in packed) / 1e6
    median, least = (sum(map(f, taken)) for f in (statistics.median, min))
    shared = in_turn(packed, threads, rounds)
    print(
        f"{name:<22}{weights:>9.2f}{median:>9.1f}{least:>9.1f}{least / weights:>9.2f}"
        f"{statistics.median(shared):>12.1f}{min(shared):>9.1f}",
        flush=True,
    )
    longest = sorted(zip(map(min, taken), packed, strict=True), key=lambda one: -one[0])[:most]
    for milliseconds, layer in longest:
        millions = layer.weights / 1e6
        what = f"  {layer.what}"
        print(
            f"{what:<31}{millions:>9.2f}{'':>9}{milliseconds:>9.2f}{milliseconds / millions:>9.2f}"
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    networks = ["resnet50", "mobilenet_v2", "efficientnet_v2_s", "resnext50_32x4d", "bert_base"]
    parser.add_argument("--networks", nargs="+", default=networks)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # stock PyTorch's own
    torch.set_num_threads(1)
    print_environment()
    print(
        f"{'':<22}{'millions':>9}{'ms':>9}{'least':>9}{'each':>9}"
        f"{f'{options.threads} threads':>12}{'least':>9}"
    )
    with torch.no_grad():
        for name in options.networks:
            print_network(name, options.rounds, options.layers, options.threads)


if __name__ == "__main__":
    main()
