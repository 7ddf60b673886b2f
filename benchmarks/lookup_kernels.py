"""Lookups of quantized tables, ours and FBGEMM's, in turn.

python -m benchmarks.lookup_kernels
X86QUANT_ISA=avx2 python -m benchmarks.lookup_kernels
python -m benchmarks.lookup_kernels --parts many --bits 8 4

One table: the kernels that rules choose among; time of FBGEMM's lookup, with the comparison of
indices before it, and of the stock operator alone, which makes none, over the native one's. Many
tables in one call: time of FBGEMM's table-batched module, which compares indices first, and of its
operator alone, over that of ``EmbeddingBags``, on the same rows.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Sequence

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


#: Many tables: how many, and rows and values of each; bags of each, and rows of a bag.
MANY, MANY_SIZE = 26, (100_000, 64)
MANY_BAGS = ((128, 1), (128, 20), (2048, 1), (2048, 20))
#: Calls with other indices, so that rows are not in the caches from the call before.
CALLS = 8


def table_batched(bits: int, check: str) -> torch.nn.Module:
    """FBGEMM's module; ``check`` is what it does about wrong indices: FATAL, or NONE."""
    home = "fbgemm_gpu.split_table_batched_embeddings_ops_"
    common = importlib.import_module(f"{home}common")
    types = importlib.import_module("fbgemm_gpu.split_embedding_configs").SparseType
    where = common.EmbeddingLocation.HOST
    specs = [(f"t{i}", *MANY_SIZE, types[f"INT{bits}"], where) for i in range(MANY)]
    found: torch.nn.Module = importlib.import_module(
        f"{home}inference"
    ).IntNBitTableBatchedEmbeddingBagsCodegen(
        specs,
        device="cpu",
        output_dtype=types.FP32,
        bounds_check_mode=common.BoundsCheckMode[check],
    )
    return found


def one_of(calls: Sequence[Callable[[], torch.Tensor]]) -> Callable[[], torch.Tensor]:
    """The calls one by one, again and again."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def many_tables(bits: int, rounds: int) -> None:
    """All tables in one call."""
    module, unchecked = table_batched(bits, "FATAL"), table_batched(bits, "NONE")
    for one in (module, unchecked):
        one.fill_random_weights()  # type: ignore[operator]
    for rows, _ in module.split_embedding_weights(split_scale_shifts=False):  # type: ignore[operator]
        rows[:, :4] = torch.randn(len(rows), 2).half().view(torch.uint8)  # scale and bias
    unchecked.assign_embedding_weights(module.split_embedding_weights())  # type: ignore[operator]
    ours = x86quant.from_table_batched(module)
    for bags, each in MANY_BAGS:
        runs: dict[str, list[Callable[[], torch.Tensor]]] = {"ours": [], "checked": [], "alone": []}
        for _ in range(CALLS):
            indices = torch.randint(0, MANY_SIZE[0], (MANY, bags * each), dtype=torch.int32)
            starts = torch.arange(0, bags * each, each, dtype=torch.int32).repeat(MANY, 1)
            flat = indices.reshape(-1)
            offsets = torch.arange(0, flat.numel() + 1, each, dtype=torch.int32)
            runs["ours"].append(functools.partial(ours, indices, starts))
            runs["checked"].append(functools.partial(module, flat, offsets))
            runs["alone"].append(functools.partial(unchecked, flat, offsets))
        got, *others = (calls[0]() for calls in runs.values())
        assert all(torch.allclose(got, x, rtol=1e-4, atol=1e-4) for x in others)
        functions = {name: one_of(one) for name, one in runs.items()}
        times = interleaved(functions, rounds=5 * rounds)  # single calls: neighbours come and go
        base = times["ours"]
        text = ", ".join(
            f"{name} {x.median / base.median:.2f} (at best {x.minimum / base.minimum:.2f})"
            for name, x in times.items()
            if name != "ours"
        )
        print(
            f"{bits} bits, {MANY} tables, {bags} bags of {each} in each: "
            f"ours {base.median * 1e6:8.1f} us (at best {base.minimum * 1e6:.1f}); "
            f"table-batched / ours: {text}",
            flush=True,
        )


def one_table(bits: int, rounds: int) -> None:
    """Each kernel, for one table."""
    for count, dim in TABLES:
        rows = quantize_rows_of_table(torch.randn(count, dim), bits)
        kernels = {name: forced(name, rows, bits) for name in ("native", "fbgemm")}
        for bags, each in BAGS:
            indices = torch.randint(0, count, (bags * each,))
            offsets = torch.arange(0, bags * each, each)
            runs: dict[str, Callable[[], torch.Tensor]] = {
                n: functools.partial(m, indices, offsets) for n, m in kernels.items()
            }
            name = {8: "byte", 4: "4bit", 2: "2bit"}[bits]
            stock = getattr(torch.ops.quantized, f"embedding_bag_{name}_rowwise_offsets")
            runs["unchecked"] = functools.partial(stock, rows, indices, offsets)
            times = interleaved(runs, rounds=rounds, calls=max(1, 4000 // (bags * each)))
            native = times.pop("native")
            text = ", ".join(
                f"{n} {x.median / native.median:.2f} (at best {x.minimum / native.minimum:.2f})"
                for n, x in times.items()
            )
            print(
                f"{bits} bits, {count} x {dim}, {bags} bags of {each}: "
                f"native {native.median * 1e6:8.1f} us; fbgemm / native: {text}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--bits", type=int, nargs="+", default=(8, 4, 2))
    parser.add_argument("--parts", nargs="+", choices=("one", "many"), default=("one", "many"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print_environment()
    for bits in options.bits:
        if "one" in options.parts:
            one_table(bits, options.rounds)
        if "many" in options.parts:
            many_tables(bits, options.rounds)


if __name__ == "__main__":
    main()
