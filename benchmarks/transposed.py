"""Transposed convolutions: microseconds in int8, the share of the roofline, and torch's float.

    python -m benchmarks.transposed [--rounds 60]

One thread; least of rounds in which both take turns. Layers as decoders, heat maps and vocoders
have them.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from x86quant.profiling import profile

#: Layers and the sizes of their inputs.
LAYERS: tuple[tuple[nn.Module, tuple[int, ...]], ...] = (
    (nn.ConvTranspose2d(64, 32, 2, 2), (56, 56)),
    (nn.ConvTranspose2d(128, 64, 3, 2, 1, 1), (28, 28)),
    (nn.ConvTranspose2d(256, 128, 4, 2, 1), (14, 14)),
    (nn.ConvTranspose2d(64, 64, 4, 2, 1, groups=64), (28, 28)),
    (nn.ConvTranspose2d(8, 8, 3, 2, 1, 1), (112, 112)),
    (nn.ConvTranspose2d(32, 32, 5, 1, 2), (28, 28)),
    (nn.ConvTranspose1d(64, 32, 16, 8, 4), (200,)),
    (nn.ConvTranspose3d(32, 16, 2, 2), (8, 16, 16)),
)


@torch.no_grad()
def row(layer: nn.Module, size: tuple[int, ...], rounds: int) -> str:
    """A line of the table."""
    x = torch.randn(1, int(layer.in_channels), *size)  # type: ignore[call-overload]
    model = nn.Sequential(layer, nn.ReLU()).eval()
    int8 = x86quant.quantize(model, [x, x], mode="static", speed_check=False, progress=False)
    times: dict[nn.Module, list[float]] = {int8: [], model: []}
    for _ in range(rounds):
        for one, taken in times.items():
            start = time.perf_counter()
            one(x)
            taken.append(time.perf_counter() - start)
    step = max(profile(int8, (x,), threads=1), key=lambda one: one.step.multiply_adds)
    ours, theirs = (min(taken) * 1e6 for taken in times.values())
    what = f"{layer}".replace("ConvTranspose", "").replace(", kernel_size=", " k")
    share = f"{step.roofline_share:.0%}" if step.roofline_share else "–"
    return f"{ours:>8.0f}{step.microseconds:>9.0f}{share:>7}{theirs:>8.0f}  {what}, input {size}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print_environment()
    print(f"{'int8 µs':>8}{'layer µs':>9}{'roof':>7}{'float':>8}")
    for layer, size in LAYERS:
        print(row(layer, size, options.rounds), flush=True)


if __name__ == "__main__":
    main()
