"""LSTMs and GRUs in int8 against other runtimes, stock dynamic quantization and fp32, in turn.

python -m benchmarks.recurrent                     # 2 x 512 units, 100 steps, batches 1 and 16
python -m benchmarks.recurrent --units 256 --layers 1 --batches 1 4
X86QUANT_ISA=avx2 python -m benchmarks.recurrent

Prints CPU, versions, times, their ratio to ours, and the noise of each against fp32.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from benchmarks.side_by_side import add_arguments, bound, compare, peers
from x86quant.bench.backends import Bind
from x86quant.dynamic import RECURRENT

ENGINES = ("fbgemm", "onednn")


class Outputs(nn.Module):
    """The states of a recurrent layer at all steps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)[0]
        return found


def candidates(layer: nn.RNNBase, x: torch.Tensor, options: argparse.Namespace) -> dict[str, Bind]:
    """What runs ``layer``, by name."""
    model = Outputs(layer).eval()
    binds = {"x86quant dynamic": bound(Outputs(RECURRENT[type(layer)].from_float(layer)))}
    calibration = [torch.randn_like(x) for _ in range(4)]
    static = x86quant.quantize(model, calibration, mode="static", speed_check=False, progress=False)
    binds["x86quant static"] = bound(static)
    for engine in ENGINES:
        torch.backends.quantized.engine = engine
        stock = torch.ao.quantization.quantize_dynamic(model, {type(layer)})
        binds[f"stock dynamic, {engine}"] = bound(stock)
    others = peers(options.peers, model, [(y,) for y in calibration], (x,), options.threads)
    return {**binds, **others, "fp32": bound(model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 16))
    parser.add_argument("--kinds", nargs="+", default=("LSTM", "GRU"), choices=("LSTM", "GRU"))
    add_arguments(parser)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print_environment()
    with torch.no_grad():
        for kind in options.kinds:
            layer = getattr(nn, kind)(options.units, options.units, num_layers=options.layers)
            for batch in options.batches:
                x = torch.randn(options.steps, batch, options.units)
                binds = candidates(layer.eval(), x, options)
                title = f"{kind} {options.layers}x{options.units}, batch {batch}"
                compare(title, binds, (x,), options.rounds)


if __name__ == "__main__":
    main()
