"""A DLRM in torch alone, in int8, against other runtimes, the stock int8 path and fp32, in turn.

python -m benchmarks.dlrm                       # 26 tables x 100,000 x 64, batches 128 and 2048
python -m benchmarks.dlrm --rows 1000000 --bits 4 --peers openvino

Ours: `x86quant.quantize(model, batches, embedding_bits=...)`. Stock: `convert_fx` with static MLPs,
quantized EmbeddingBags and the interaction in fp32, as it leaves it. Prints CPU, versions, times,
their ratio to ours, and the noise against fp32. Then lookups alone: bytes of the cache lines that
are touched, as a share of what reading memory in order gives in the same process, and of what the
plainest loop reaches that reads the same rows in the same order; and the share of the time that
comparing indices with their bounds takes. All are timed on one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import x86quant
from benchmarks.environment import print_environment
from benchmarks.random_rows import AHEAD, reading
from benchmarks.side_by_side import Call, add_arguments, bound, compare, peers
from tests.native.capi import Library
from tests.native.capi_floats import Fault, Lookup
from x86quant import extension
from x86quant.bench.recommender import DENSE, PlainDlrm
from x86quant.dynamic import WeightOnlyEmbeddingBag
from x86quant.profiling.timing import interleaved


def batch(tables: int, rows: int, samples: int) -> Call:
    """Uniform indices, which no cache helps with; one of each table a sample."""
    return torch.randn(samples, DENSE), torch.randint(0, rows, (samples, tables))


class ByTable(PlainDlrm):
    """The same on indices [tables, samples]: the stock quantized tables take no other views."""

    def columns(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [indices[i, :, None] for i in range(len(self.tables))]


def stock_int8(model: PlainDlrm, options: argparse.Namespace, batches: list[Call]) -> Any:
    """``model`` by the stock tools, with tables in 8 bits."""
    from torch.ao.quantization import (
        float_qparams_weight_only_qconfig,
        get_default_qconfig_mapping,
    )
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "x86"
    mapping = get_default_qconfig_mapping("x86")
    mapping.set_object_type(nn.EmbeddingBag, float_qparams_weight_only_qconfig)
    by_table = ByTable(options.tables, options.rows, options.size).eval()
    by_table.load_state_dict(model.state_dict())
    turned = [(dense, indices.t().contiguous()) for dense, indices in batches]
    prepared = prepare_fx(by_table, mapping, turned[0])
    for one in turned:
        prepared(*one)
    found = convert_fx(prepared)
    return lambda dense, indices: found(dense, indices.t().contiguous())


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
            **{f"plain {n}": reading(ours.rows, indices, n) for n in AHEAD},
        }
        times = interleaved(runs, rounds=options.rounds, calls=1)
        width = ours.rows.shape[1]
        lines = sum((o + width + 63) // 64 for o in range(0, 64, 4)) / 16 * 64
        got = options.lookups * lines / times["x86quant"].median / 1e9
        plain = min((f"plain {n}" for n in AHEAD), key=lambda name: times[name].median)
        roof = got / ratio(times, plain)
        print(
            f"{bits} bits, {ours.rows.nbytes >> 20} MB, bags of 20: {got:.1f} GB/s of cache lines "
            f"({got / speed:.0%}); the plainest loop {roof:.1f} GB/s ({roof / speed:.0%}), "
            f"{plain.removeprefix('plain ')} rows ahead, of which this is {got / roof:.0%}; "
            f"stock / x86quant {ratio(times, 'stock'):.2f}, "
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
    parser.add_argument("--bits", type=int, nargs="+", default=(8, 4), help="0: in float")
    parser.add_argument("--batches", type=int, nargs="+", default=(128, 2048))
    add_arguments(parser)
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
    model = PlainDlrm(options.tables, options.rows, options.size).eval()
    data = [batch(options.tables, options.rows, 256) for _ in range(4)]
    own = {}
    for bits in options.bits:
        quantized = x86quant.quantize(
            model, data, embedding_bits=bits or None, progress=False, speed_check=False
        )
        own[f"x86quant, tables in {f'{bits} bits' if bits else 'float'}"] = bound(quantized)
    stock = bound(stock_int8(model, options, data))
    for samples in options.batches:
        example = batch(options.tables, options.rows, samples)
        calibration = [batch(options.tables, options.rows, samples) for _ in range(4)]
        others = peers(options.peers, model, calibration, example, options.threads)
        binds = {**own, "stock int8": stock, **others, "fp32": bound(model)}
        compare(f"batch {samples}", binds, example, options.rounds)


if __name__ == "__main__":
    main()
