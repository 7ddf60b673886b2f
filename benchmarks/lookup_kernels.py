"""The kernels that rules choose among for bags of embeddings, in turn.

python -m benchmarks.lookup_kernels
X86QUANT_ISA=avx2 python -m benchmarks.lookup_kernels

Prints time of FBGEMM's lookup, with the comparison of indices before it, over the native one's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import warnings

import torch

import x86quant
from benchmarks.environment import print_environment
from x86quant.dynamic import WeightOnlyEmbeddingBag
from x86quant.dynamic.embedding_bag import quantize_rows_of_table
from x86quant.profiling.timing import interleaved

#: Rows and values of each: in the first-level cache, in the second, and in memory.
TABLES = ((500, 32), (10_000, 64), (10_000, 128), (2_000_000, 64))
#: Bags, and rows of each.
BAGS = ((1, 20), (128, 1), (128, 20), (2048, 20))


def forced(kernel: str, rows: torch.Tensor, bits: int) -> WeightOnlyEmbeddingBag:
    """A table that ``kernel`` looks up."""
    found = WeightOnlyEmbeddingBag(rows, "sum", bits=bits)
    with x86quant.override(kernel, op="embedding_bag"):
        assert {choice.kernel for choice in found.routes.choices} == {kernel}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--bits", type=int, nargs="+", default=(8, 4, 2))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print_environment()
    for bits, (count, dim) in itertools.product(options.bits, TABLES):
        rows = quantize_rows_of_table(torch.randn(count, dim), bits)
        kernels = {name: forced(name, rows, bits) for name in ("native", "fbgemm")}
        for bags, each in BAGS:
            indices = torch.randint(0, count, (bags * each,))
            offsets = torch.arange(0, bags * each, each)
            runs = {n: functools.partial(m, indices, offsets) for n, m in kernels.items()}
            times = interleaved(runs, rounds=options.rounds, calls=max(1, 4000 // (bags * each)))
            native, other = times["native"], times["fbgemm"]
            print(
                f"{bits} bits, {count} x {dim}, {bags} bags of {each}: "
                f"native {native.median * 1e6:8.1f} us, fbgemm / native "
                f"{other.median / native.median:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
