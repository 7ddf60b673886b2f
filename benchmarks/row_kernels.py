"""The ops between the products of a transformer, one by one and as an encoder, against torch.

python -m benchmarks.row_kernels                  # BERT-base and MiniLM
X86QUANT_ISA=avx2 python -m benchmarks.row_kernels --rounds 20

Each line gives an op's time, its multiply-adds a nanosecond, and how many times longer torch takes
for the same in float32 and in bfloat16; times are the least of interleaved rounds on one thread. An
encoder is a stack of layers: QKV, attention, projection + residual + norm, feed-forward up + GELU,
down + residual + norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.environment import print_environment
from x86quant import extension
from x86quant.ops.rows import CODES, NORMED
from x86quant.profiling.timing import interleaved

Run = Callable[[], object]
OPS = torch.ops.x86quant
# Features, inner features, heads, layers, (batch, tokens).
MODELS = {
    "BERT-base": (768, 3072, 12, 12, ((1, 128), (1, 384))),
    "MiniLM": (384, 1536, 12, 6, ((1, 16), (1, 32), (1, 128), (32, 32))),
}


class Layer:
    """Random weights of one encoder layer, in int8 and in float."""

    def __init__(self, features: int, inner: int, heads: int) -> None:
        self.heads, self.size = heads, features // heads
        shapes = {
            "qkv": (3 * features, features),
            "out": (features, features),
            "up": (inner, features),
            "down": (features, inner),
        }
        self.float = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
        self.half = {name: weight.bfloat16() for name, weight in self.float.items()}
        self.int8 = {}
        for name, weight in self.float.items():
            scale = weight.abs().amax(1) / 127
            codes = (weight / scale[:, None]).round().to(torch.int8)
            self.int8[name] = (codes, scale, torch.zeros(len(weight)))
        self.norm = (torch.ones(features), torch.zeros(features), 1e-12, "layer")

    def native(self, x: torch.Tensor, codes: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Normed floats and their codes after the layer."""
        batch, tokens, _ = x.shape
        qkv = OPS.linear_rows(*codes, *self.int8["qkv"]).view(
            batch, tokens, 3, self.heads, self.size
        )
        attended = OPS.attention_rows(*qkv.unbind(2), None, False, self.size**-0.5)
        wanted = (*self.norm, NORMED | CODES)
        _, x, *read = OPS.linear_rows_norm(*attended, *self.int8["out"], x, *wanted)
        inner = OPS.linear_rows_rows(*read, *self.int8["up"], "gelu")
        _, x, *read = OPS.linear_rows_norm(*inner, *self.int8["down"], x, *wanted)
        return (x, *read)

    def torchs(self, x: torch.Tensor) -> torch.Tensor:
        """The same in torch, in the type of ``x``."""
        weights = self.float if x.dtype == torch.float32 else self.half
        batch, tokens, features = x.shape
        qkv = F.linear(x, weights["qkv"]).view(batch, tokens, 3, self.heads, self.size)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = F.layer_norm(x + F.linear(attended, weights["out"]), (features,))
        inner = F.gelu(F.linear(x, weights["up"]))
        return F.layer_norm(x + F.linear(inner, weights["down"]), (features,))


def linear(
    x: torch.Tensor, weight: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What torch runs where ours is one op."""
    return act(F.linear(x, weight))


def report(name: str, runs: dict[str, Run], products: int, rounds: int) -> None:
    """One line of the table."""
    timings = interleaved(runs, rounds=rounds)
    took = {name: timing.minimum * 1e6 for name, timing in timings.items()}
    ours = took.pop("ours")
    ratios = "".join(f"{took[other] / ours:>9.2f}x" for other in ("fp32", "bf16"))
    print(f"{name:<36}{ours:>10.1f}{products / ours / 1e3:>10.0f}{ratios}", flush=True)


def measure(name: str, batch: int, tokens: int, rounds: int) -> None:
    """All ops of one model at one size, then its encoder."""
    features, inner, heads, depth, _ = MODELS[name]
    layers = [Layer(features, inner, heads) for _ in range(depth)]
    first = layers[0]
    x = torch.randn(batch, tokens, features)
    codes, x16 = OPS.quantize_rows(x), x.bfloat16()
    rows = batch * tokens
    print(f"\n{name}, {batch} x {tokens} tokens{'µs':>21}{'MAC/ns':>10}{'fp32':>10}{'bf16':>10}")
    for site, activation in (("qkv", None), ("up", "gelu")):
        weights = first.int8[site]
        act: Callable[[torch.Tensor], torch.Tensor] = F.gelu if activation else lambda y: y
        runs: dict[str, Run] = {
            "ours": partial(OPS.linear_rows, *codes, *weights, activation),
            "fp32": partial(linear, x, first.float[site], act),
            "bf16": partial(linear, x16, first.half[site], act),
        }
        report(f"{site} {activation or ''}", runs, rows * weights[0].numel(), rounds)
    q, k, v = (torch.randn(batch, tokens, heads, features // heads) for _ in range(3))
    turned = [part.transpose(1, 2) for part in (q, k, v)]
    turned16 = [part.bfloat16() for part in turned]
    runs = {
        "ours": lambda: OPS.attention_rows(q, k, v, None, False, 0.125),
        "fp32": lambda: F.scaled_dot_product_attention(*turned),
        "bf16": lambda: F.scaled_dot_product_attention(*turned16),
    }
    report("attention", runs, 2 * rows * tokens * features, rounds)
    runs = {
        "ours": lambda: OPS.norm_rows(x, x, *first.norm, CODES),
        "fp32": lambda: F.layer_norm(x + x, (features,)),
        "bf16": lambda: F.layer_norm(x16 + x16, (features,)),
    }
    report("norm and codes", runs, 0, rounds)

    def encoder() -> None:
        values: tuple[torch.Tensor, ...] = (x, *codes)
        for layer in layers:
            values = layer.native(values[0], values[1:])

    def stack(value: torch.Tensor) -> None:
        for layer in layers:
            value = layer.torchs(value)

    runs = {"ours": encoder, "fp32": lambda: stack(x), "bf16": lambda: stack(x16)}
    total = rows * depth * (4 * features * features + 2 * features * inner)
    report(f"encoder of {depth} layers", runs, total, max(rounds // 3, 3))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    extension.load()
    print_environment()
    with torch.inference_mode():
        for name in options.models:
            for batch, tokens in MODELS[name][-1]:
                measure(name, batch, tokens, options.rounds)


if __name__ == "__main__":
    main()
