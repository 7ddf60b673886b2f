"""LSTMs and GRUs in int8 against stock dynamic quantization and fp32, taking turns.

python -m benchmarks.recurrent                     # 2 x 512 units, 100 steps, batches 1 and 16
python -m benchmarks.recurrent --units 256 --layers 1 --batches 1 4
X86QUANT_ISA=avx2 python -m benchmarks.recurrent

Prints milliseconds, the stock time over ours, and the noise of each against fp32.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.dynamic_linear import decibels
from benchmarks.environment import print_environment
from x86quant.dynamic import RECURRENT
from x86quant.profiling.timing import interleaved

ENGINES = ("fbgemm", "onednn")


def candidates(layer: nn.RNNBase, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """What runs ``layer`` on ``x``, by name."""
    ours = RECURRENT[type(layer)].from_float(layer)
    runs: dict[str, Callable[[], torch.Tensor]] = {"x86quant": lambda: ours(x)[0]}
    for engine in ENGINES:
        torch.backends.quantized.engine = engine
        stock = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {type(layer)})
        runs[f"stock {engine}"] = lambda stock=stock: stock(x)[0]  # type: ignore[misc]
    runs["fp32"] = lambda: layer(x)[0]
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 16))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print_environment()
    with torch.inference_mode():
        for kind in (nn.LSTM, nn.GRU):
            layer = kind(options.units, options.units, num_layers=options.layers).eval()
            for batch in options.batches:
                x = torch.randn(options.steps, batch, options.units)
                runs = candidates(layer, x)
                times = interleaved(runs, rounds=options.rounds, calls=1)
                ours = times["x86quant"]
                print(f"{kind.__name__} {options.layers}x{options.units}, batch {batch}")
                for name, run in runs.items():
                    time = times[name]
                    quality = "" if name == "fp32" else f"{decibels(run(), runs['fp32']()):8.1f} dB"
                    print(
                        f"  {name:<14}{time.median * 1e3:9.2f} ms "
                        f"{time.median / ours.median:6.2f} x ours {quality}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
