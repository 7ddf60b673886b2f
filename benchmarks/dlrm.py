"""A DLRM in int8 against the stock int8 path and fp32, taking turns.

python -m benchmarks.dlrm                       # 26 tables x 100,000 x 64, batches 128 and 2048
python -m benchmarks.dlrm --rows 1000000 --bits 4

Ours: `x86quant.quantize(model, batches, embedding_bits=...)`, one graph. Stock: `convert_fx` with
static MLPs, quantized EmbeddingBags and the interaction in fp32, as it leaves it. Then lookups
alone: bytes of the cache lines that are touched, as a share of what reading memory in order gives
in the same process, and the share of the time that comparing indices with their bounds takes.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from x86quant import extension
from x86quant.dynamic import WeightOnlyEmbeddingBag
from x86quant.kernels.native.capi import Library
from x86quant.kernels.native.capi_floats import Fault, Lookup
from x86quant.profiling.timing import interleaved

DENSE = 13
BOTTOM, TOP = (512, 256), (512, 512, 256)


def layers(*sizes: int) -> list[nn.Module]:
    """Linears and ReLUs."""
    return [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]


class Dlrm(nn.Module):
    """As Naumov et al. describe it; one index of each table a sample, or bags of them."""

    def __init__(self, tables: int, rows: int, size: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(*layers(DENSE, *BOTTOM, size))
        bags = [nn.EmbeddingBag(rows, size, mode="sum") for _ in range(tables)]
        self.tables = x86quant.EmbeddingBags(bags)
        self.interaction = x86quant.DotInteraction()
        wide = size + tables * (tables + 1) // 2
        self.top = nn.Sequential(*layers(wide, *TOP), nn.Linear(TOP[-1], 1))

    def forward(
        self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """``indices`` and ``offsets`` are those of all tables, stacked."""
        rows = self.tables(indices, offsets)
        logits: torch.Tensor = self.top(self.interaction(self.bottom(dense), rows))
        return logits


class StockDlrm(nn.Module):
    """The same in torch alone, which is what the stock tools can read."""

    def __init__(self, model: Dlrm) -> None:
        super().__init__()
        self.bottom, self.top = model.bottom, model.top
        self.tables = nn.ModuleList(model.tables.tables)
        count = len(self.tables) + 1
        self.register_buffer("pairs", torch.tril_indices(count, count, -1))

    def forward(
        self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """As ``Dlrm``."""
        first = self.bottom(dense)
        rows = [table(indices[i], offsets[i]) for i, table in enumerate(self.tables)]
        every = torch.stack([first, *rows], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        joined = torch.cat([first, products[:, self.pairs[0], self.pairs[1]]], 1)
        logits: torch.Tensor = self.top(joined)
        return logits


def batch(tables: int, rows: int, samples: int) -> tuple[torch.Tensor, ...]:
    """Uniform indices, which no cache helps with."""
    indices = torch.randint(0, rows, (tables, samples))
    offsets = torch.arange(samples).repeat(tables, 1)
    return torch.randn(samples, DENSE), indices, offsets


def stock_int8(model: Dlrm, batches: list[tuple[torch.Tensor, ...]], bits: int) -> nn.Module:
    """``model`` by the stock tools."""
    from torch.ao.quantization import (
        float_qparams_weight_only_qconfig,
        float_qparams_weight_only_qconfig_4bit,
        get_default_qconfig_mapping,
    )
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "x86"
    tables = float_qparams_weight_only_qconfig
    if bits == 4:
        tables = float_qparams_weight_only_qconfig_4bit
    mapping = get_default_qconfig_mapping("x86").set_object_type(nn.EmbeddingBag, tables)
    prepared = prepare_fx(StockDlrm(model).eval(), mapping, batches[0])
    for one in batches:
        prepared(*one)
    found: nn.Module = convert_fx(prepared)
    return found


def memory_bandwidth() -> float:
    """GB/s of reading memory in order, with this many threads."""
    big = torch.ones(64_000_000)  # 256 MB; the caches of some servers are as large
    times = interleaved({"sum": big.sum}, rounds=7, calls=1)
    return big.nbytes / times["sum"].minimum / 1e9


def lookups(options: argparse.Namespace) -> None:
    """Lookups alone, from tables that overflow the caches."""
    speed = memory_bandwidth()
    print(f"\nreading memory in order: {speed:.1f} GB/s")
    for bits in (8, 4):
        table = nn.EmbeddingBag(options.big_rows, options.size, mode="sum")
        ours = WeightOnlyEmbeddingBag.from_float(table, "big", bits)
        del table
        indices = torch.randint(0, options.big_rows, (options.lookups,))
        offsets = torch.arange(0, options.lookups, 20)
        stock_op = getattr(
            torch.ops.quantized, f"embedding_bag_{'byte' if bits == 8 else '4bit'}_rowwise_offsets"
        )
        runs: dict[str, Callable[[], Any]] = {
            "x86quant": functools.partial(ours, indices, offsets),
            "stock": functools.partial(stock_op, ours.rows, indices, offsets),
            "check": checking(options.big_rows, indices, offsets),
        }
        times = interleaved(runs, rounds=options.rounds, calls=1)
        width = ours.rows.shape[1]
        lines = sum((o + width + 63) // 64 for o in range(0, 64, 4)) / 16 * 64
        got = options.lookups * lines / times["x86quant"].median / 1e9
        print(
            f"{bits} bits, {ours.rows.nbytes >> 20} MB, bags of 20: {got:.1f} GB/s of cache lines "
            f"({got / speed:.0%}), stock / x86quant {ratio(times, 'stock'):.2f}, "
            f"checks {ratio(times, 'check'):.1%} of the time"
        )


def checking(rows: int, indices: torch.Tensor, offsets: torch.Tensor) -> Callable[[], Any]:
    """The comparisons of one lookup alone."""
    library = Library(Path(extension.__file__).with_name("_C.so")).lib
    op = Lookup(
        row_count=rows, long_indices=1, indices=indices.data_ptr(), offsets=offsets.data_ptr(),
        index_count=len(indices), bags=len(offsets),
    )  # fmt: skip
    begin, end = ctypes.c_int64(0), ctypes.c_int64(len(offsets))
    arguments = (ctypes.byref(op), begin, end, ctypes.byref(Fault()))
    return functools.partial(library.xq_lookup_verify, *arguments)


def ratio(times: Any, name: str) -> float:
    """The median time of ``name`` over ours."""
    return float(times[name].median / times["x86quant"].median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--bits", type=int, nargs="+", default=(8, 4))
    parser.add_argument("--batches", type=int, nargs="+", default=(128, 2048))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--big-rows", type=int, default=10_000_000)
    parser.add_argument("--lookups", type=int, default=200_000)
    parser.add_argument("--parts", nargs="+", default=("model", "lookups"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print_environment()
    with torch.no_grad():
        if "model" in options.parts:
            models(options)
        if "lookups" in options.parts:
            lookups(options)


def models(options: argparse.Namespace) -> None:
    """Whole models."""
    model = Dlrm(options.tables, options.rows, options.size).eval()
    data = [batch(options.tables, options.rows, 256) for _ in range(4)]
    for bits in options.bits:
        ours = x86quant.quantize(
            model, data, embedding_bits=bits, progress=False, speed_check=False
        )
        stock = stock_int8(model, data, bits)
        for samples in options.batches:
            inputs = batch(options.tables, options.rows, samples)
            runs: dict[str, Callable[[], torch.Tensor]] = {
                "x86quant": functools.partial(ours, *inputs),
                "stock int8": functools.partial(stock, *inputs),
                "fp32": functools.partial(model, *inputs),
            }
            want = runs["fp32"]()
            times = interleaved(runs, rounds=options.rounds, calls=1)
            print(f"tables in {bits} bits, batch {samples}")
            for name, run in runs.items():
                noise = (run() - want).square().mean() / want.square().mean()
                quality = "" if name == "fp32" else f"{-10 * float(noise.log10()):6.1f} dB"
                print(
                    f"  {name:<11}{times[name].median * 1e3:8.3f} ms {ratio(times, name):6.2f} "
                    f"x ours {quality}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
