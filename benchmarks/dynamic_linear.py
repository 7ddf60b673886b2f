"""Dynamic and weight-only linears against the stock ones and torch's floats, shape by shape.

python -m benchmarks.dynamic_linear                  # all shapes, rows 1 to 512
python -m benchmarks.dynamic_linear --rows 1 128 --csv dynamic.csv
X86QUANT_ISA=avx2 python -m benchmarks.dynamic_linear

Every candidate is checked against the float result before it is timed. One that is wrong shows as
nan and does not count: FBGEMM and oneDNN saturate on CPUs without VNNI. The stock engines quantize
a whole tensor by one range, ours each row: the last columns say what that costs in accuracy.
"""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.environment import print_environment
from x86quant.dynamic import DynamicLinear, WeightOnlyLinear
from x86quant.profiling.timing import interleaved

# MiniLM, BERT-base, BERT-large; query, feed-forward up and down.
SHAPES = (
    (384, 384),
    (384, 1536),
    (1536, 384),
    (768, 768),
    (768, 3072),
    (3072, 768),
    (1024, 1024),
    (1024, 4096),
    (4096, 1024),
)
ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
STOCK = ("qnnpack", "fbgemm", "onednn")
DYNAMIC = ("x86quant", *STOCK)

Runs = dict[str, Callable[[], torch.Tensor]]


def candidates(linear: torch.nn.Linear, x: torch.Tensor) -> Runs:
    runs: Runs = {}
    ours = DynamicLinear.from_float(linear)
    runs["x86quant"] = lambda: ours(x)
    weight = linear.weight.detach()
    scales, zeros = ours.weight_scale.double(), torch.zeros(len(weight), dtype=torch.long)
    for engine in STOCK:
        torch.backends.quantized.engine = engine
        if engine == "qnnpack":  # its dynamic linear has one scale for all channels
            scale = weight.abs().max().item() / 127
            quantized = torch.quantize_per_tensor(weight, scale, 0, torch.qint8)
        else:
            quantized = torch._make_per_channel_quantized_tensor(ours.weight, scales, zeros, 0)
        pack = torch.ops.quantized.linear_prepack(quantized, linear.bias)
        runs[engine] = lambda pack=pack: torch.ops.quantized.linear_dynamic(x, pack)
    runs["fp32"] = lambda: linear(x)
    weight16, bias16, x16 = (t.detach().bfloat16() for t in (linear.weight, linear.bias, x))
    runs["bf16"] = lambda: F.linear(x16, weight16, bias16)
    weight_only = WeightOnlyLinear.from_float(linear)
    runs["w8"] = lambda: weight_only(x)
    scales16 = weight_only.weight_scale.bfloat16()
    runs["aten w8"] = lambda: torch._weight_int8pack_mm(x16, weight_only.weight, scales16) + bias16
    return runs


def decibels(got: torch.Tensor, want: torch.Tensor) -> float:
    noise = (got.float() - want).square().sum().item()
    return 10 * math.log10(want.square().sum().item() / max(noise, 1e-30))


def measure(in_features: int, out_features: int, rows: int, rounds: int) -> dict[str, float]:
    linear = torch.nn.Linear(in_features, out_features)
    # Rows of different size, with outlying channels, as in a transformer.
    x = torch.randn(rows, in_features) * torch.rand(rows, 1).exp()
    x[:, :: in_features // 8] *= 4
    want = F.linear(x, linear.weight, linear.bias)
    runs = candidates(linear, x)
    result: dict[str, float] = {}
    for name, run in list(runs.items()):
        quality = decibels(run(), want)
        if quality < 20:
            result[name] = math.nan
            del runs[name]
        if name in DYNAMIC:
            result[f"{name} dB"] = quality
    if "x86quant" not in runs:
        raise SystemExit(f"x86quant is wrong at {in_features}→{out_features}, {rows} rows")
    calls = max(1, 2_000_000 // (rows * in_features * out_features // 200 + 20_000))
    for name, timing in interleaved(runs, rounds=rounds, calls=calls).items():
        result[name] = timing.median * 1e6
    names = (*DYNAMIC, "fp32", "bf16", "w8", "aten w8")
    return {name: result[name] for name in (*names, *(f"{n} dB" for n in DYNAMIC))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--csv", help="write all figures to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    print_environment()
    table: list[dict[str, float]] = []
    header = False
    with torch.inference_mode():
        for in_features, out_features in SHAPES:
            for rows in options.rows:
                figures = measure(in_features, out_features, rows, options.rounds)
                times = [name for name in figures if not name.endswith("dB")]
                if not header:
                    columns = [f"{name:>9}" for name in times]
                    print(f"{'µs':<11}{'rows':>5}", *columns, " best stock/ours  dB: ours, fbgemm")
                    header = True
                best = min(figures[name] for name in STOCK if not math.isnan(figures[name]))
                print(
                    f"{f'{in_features}→{out_features}':<11}{rows:>5}",
                    *(f"{figures[name]:>9.1f}" for name in times),
                    f"{best / figures['x86quant']:>12.2f}",
                    f"{figures['x86quant dB']:>12.1f} {figures['fbgemm dB']:.1f}",
                    flush=True,
                )
                table.append({"in": in_features, "out": out_features, "rows": rows, **figures})
    for name in [*STOCK, "fp32", "bf16"]:
        ratios = [
            math.log(row[name] / row["x86quant"]) for row in table if not math.isnan(row[name])
        ]
        mean = math.exp(sum(ratios) / len(ratios))
        print(f"{name} / x86quant: geometric mean {mean:.2f}, least {math.exp(min(ratios)):.2f}")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
