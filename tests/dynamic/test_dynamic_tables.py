"""Embeddings and bags of embeddings out of int8 tables: values, forms of input, bad indices."""

from __future__ import annotations

import copy
import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import x86quant
from x86quant import extension
from x86quant.dynamic import (
    DotInteraction,
    EmbeddingBags,
    RowwiseEmbedding,
    WeightOnlyEmbedding,
    WeightOnlyEmbeddingBag,
    to_dynamic,
)
from x86quant.dynamic.embedding_bag import quantize_rows_of_table
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.ops.embedding import embedding_bags

ROWS, SIZE = 40, 12


def make(**options: Any) -> tuple[nn.EmbeddingBag, WeightOnlyEmbeddingBag]:
    torch.manual_seed(0)
    real = nn.EmbeddingBag(ROWS, SIZE, **options)
    ours = to_dynamic(nn.ModuleDict({"clicks": real}), embeddings=True)["clicks"]
    assert isinstance(ours, WeightOnlyEmbeddingBag)
    return real, ours


def exact(real: nn.EmbeddingBag, ours: WeightOnlyEmbeddingBag) -> nn.EmbeddingBag:
    """The float module of the values that the int8 table stands for."""
    real.weight = nn.Parameter(ours.weight.dequantize())
    return real


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("last", [True, False])
def test_bags(mode: str, dtype: torch.dtype, padding: int | None, last: bool) -> None:
    real, ours = make(mode=mode, padding_idx=padding, include_last_offset=last)
    float_rows = real.weight.detach().clone()
    assert (ours.weight - float_rows).abs().max() <= (float_rows.max() - float_rows.min()) / 255
    exact(real, ours)
    indices = torch.tensor([3, 3, 5, 39, 0, 3, 7, 39], dtype=dtype)
    for offsets in ([0, 2, 4, 4, 7], [0], [0, 8], [0, 0, 0]):
        starts = torch.tensor([*offsets, 8] if last else offsets, dtype=dtype)
        with torch.no_grad():
            assert torch.allclose(ours(indices, starts), real(indices, starts), atol=1e-5)
    if not last:
        table = torch.randint(0, ROWS, (5, 4), dtype=dtype)
        with torch.no_grad():
            assert torch.allclose(ours(table), real(table), atol=1e-5)


@pytest.mark.parametrize("padding", [None, 3])
def test_weights_of_samples(padding: int | None) -> None:
    real, ours = make(mode="sum", padding_idx=padding)
    exact(real, ours)
    indices, starts = torch.tensor([3, 3, 5, 39, 0]), torch.tensor([0, 2, 2])
    weights = torch.randn(5)
    with torch.no_grad():
        assert torch.allclose(
            ours(indices, starts, weights), real(indices, starts, weights), atol=1e-5
        )
        table, weights = torch.randint(0, ROWS, (3, 4)), torch.randn(3, 4)
        want = real(table, per_sample_weights=weights)
        assert torch.allclose(ours(table, per_sample_weights=weights), want, atol=1e-5)
    with pytest.raises(InvalidInputError, match="of the input's shape"):
        ours(indices, starts, torch.ones(4))
    with pytest.raises(InvalidInputError, match="need mode sum"):
        make(mode="mean")[1](indices, starts, torch.ones(5))


BAD = {
    "index 40 at position 2 is not in 0..39": ([0, 1, 40], [0]),
    "index -1 at position 0 is not in": ([-1, 1, 4], [0]),
    "offsets must start with 0": ([0, 1, 2], [1, 2]),
    "offset 2 is less than": ([0, 1, 2], [0, 2, 1]),
    "offset 1 is less than the one before it, or beyond": ([0, 1, 2], [4]),
    "offsets must start with 0, got 9": ([0, 1, 2], [9]),
}


@pytest.mark.parametrize(("message", "call"), BAD.items())
@pytest.mark.parametrize(
    ("mode", "dtype"), [*itertools.product(("sum", "mean", "max"), (torch.int32, torch.int64))]
)
def test_bad_indices_name_table_and_position(
    message: str, call: Any, mode: str, dtype: torch.dtype
) -> None:
    indices, offsets = (torch.tensor(values, dtype=dtype) for values in call)
    if message.startswith("offset 1"):
        offsets = torch.tensor([0, 4], dtype=dtype)
        message = "offset 1 is less than the one before it, or beyond the 3 indices: 4"
    with pytest.raises(InvalidInputError, match="the table clicks: ") as found:
        make(mode=mode)[1](indices, offsets)
    assert message in str(found.value)


def test_bad_forms_are_refused() -> None:
    _, ours = make(include_last_offset=True)
    with pytest.raises(InvalidInputError, match="the last offset is 2, but there are 3"):
        ours(torch.tensor([0, 1, 2]), torch.tensor([0, 2]))
    with pytest.raises(InvalidInputError, match="there must be an offset"):
        ours(torch.tensor([0]), torch.tensor([], dtype=torch.int64))
    with pytest.raises(InvalidInputError, match="must be int32 or int64"):
        ours(torch.tensor([0.0]), torch.tensor([0]))
    with pytest.raises(InvalidInputError, match="two-dimensional without offsets"):
        ours(torch.tensor([0]))


def test_the_format_is_that_of_the_stock_op() -> None:
    real, ours = make(mode="sum")
    assert torch.equal(
        ours.rows, torch.ops.quantized.embedding_bag_byte_prepack(real.weight.detach())
    )
    values = torch.ops.quantized.embedding_bag_byte_unpack(ours.rows)
    assert torch.equal(ours.weight.dequantize(), values)


def test_exported_bags() -> None:
    _, ours = make(mode="sum")
    table = torch.randint(0, ROWS, (5, 4))
    program = torch.export.export(ours, (table,), strict=False)
    assert torch.allclose(program.module()(table), ours(table), atol=1e-5)


def test_an_embedding_names_what_is_wrong() -> None:
    real = nn.ModuleDict({"words": nn.Embedding(ROWS, SIZE, padding_idx=2)})
    ours = to_dynamic(real, embeddings=True)["words"]
    assert isinstance(ours, WeightOnlyEmbedding)
    assert (ours.num_embeddings, ours.embedding_dim, ours.padding_idx) == (ROWS, SIZE, 2)
    with pytest.raises(
        InvalidInputError, match=r"the table words: index 40 at position \(1, 0\) is not in 0\.\.39"
    ):
        ours(torch.tensor([[1, 2], [40, 3]]))


def test_tables_of_weight_only_models() -> None:
    model = nn.Sequential(nn.EmbeddingBag(ROWS, SIZE), nn.Linear(SIZE, 3))
    ours = x86quant.quantize(model, None, mode="weight_only")
    assert isinstance(ours[0], WeightOnlyEmbeddingBag)
    assert set(ours.quantization.int8_layers) == {"0", "1"}
    rewriting = nn.Sequential(nn.EmbeddingBag(ROWS, SIZE, max_norm=1.0), nn.Linear(SIZE, 3))
    kept = x86quant.quantize(rewriting, None, mode="weight_only")
    assert type(kept[0]) is nn.EmbeddingBag


# ------------------------------------------------------------------------- 8, 4 and 2 bits


BITS = (8, 4, 2)


def in_bits(bits: int, **options: Any) -> tuple[nn.EmbeddingBag, WeightOnlyEmbeddingBag]:
    torch.manual_seed(0)
    real = nn.EmbeddingBag(ROWS, SIZE, **options)
    ours = to_dynamic(nn.ModuleDict({"clicks": real}), embeddings=bits)["clicks"]
    assert isinstance(ours, WeightOnlyEmbeddingBag)
    return real, ours


@pytest.mark.parametrize("bits", BITS)
def test_rows_are_those_of_the_stock_operators(bits: int) -> None:
    real, ours = in_bits(bits, mode="sum")
    name = {8: "byte", 4: "4bit", 2: "2bit"}[bits]
    stock = torch.ops.quantized
    packed = getattr(stock, f"embedding_bag_{name}_prepack")(real.weight.detach())
    assert torch.equal(ours.rows, packed)
    values = getattr(stock, f"embedding_bag_{name}_unpack")(packed)
    assert torch.allclose(ours.weight.dequantize(), values, atol=1e-6)
    assert (ours.bits, ours.embedding_dim, ours.num_embeddings) == (bits, SIZE, ROWS)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_in_fewer_bits(bits: int, mode: str) -> None:
    real, ours = in_bits(bits, mode=mode, padding_idx=3)
    exact(real, ours)
    indices, starts = torch.tensor([3, 3, 5, 39, 0, 3, 7, 39]), torch.tensor([0, 2, 4, 4, 7])
    with torch.no_grad():
        assert torch.allclose(ours(indices, starts), real(indices, starts), atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_embeddings_in_fewer_bits(bits: int) -> None:
    real = nn.ModuleDict({"words": nn.Embedding(ROWS, SIZE, padding_idx=2)})
    ours = to_dynamic(real, embeddings=bits)["words"]
    assert isinstance(ours, RowwiseEmbedding)
    assert (ours.padding_idx, ours.bits) == (2, bits)
    values = ours.weight.dequantize()
    for ids in (torch.randint(0, ROWS, (2, 3, 4)), torch.tensor(5), torch.empty(0, 3).int()):
        assert torch.allclose(ours(ids), values[ids.long()], atol=1e-6)
    with pytest.raises(InvalidInputError, match="the table words: index 40 at position 2 is not"):
        ours(torch.tensor([[1, 2], [40, 3]]))
    assert ours.half()(torch.tensor([1])).dtype == torch.float16


def test_sizes_that_do_not_fill_bytes_keep_8_bits() -> None:
    model = nn.ModuleList([nn.Embedding(5, 7), nn.EmbeddingBag(5, 6), nn.EmbeddingBag(5, 8)])
    found = to_dynamic(model, embeddings=2)
    assert [table.bits for table in found] == [8, 8, 2]
    with pytest.raises(InvalidInputError, match="8, 4 or 2 bits, not 3"):
        to_dynamic(model, embeddings=3)


# ------------------------------------------------------------------------- many tables at once


def many(bits: int | None = 4, **options: Any) -> tuple[EmbeddingBags, EmbeddingBags]:
    torch.manual_seed(1)
    bags = [nn.EmbeddingBag(rows, size, **options) for rows, size in ((9, 8), (40, 16), (300, 4))]
    real = EmbeddingBags(bags)
    ours = real if bits is None else to_dynamic(real, embeddings=bits)
    assert isinstance(ours, EmbeddingBags)
    for bag, table in zip(real.tables, ours.tables, strict=True):
        bag.weight = nn.Parameter(table.weight.detach().clone())
    return real, ours


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("bags", [1, 5, 200])
def test_many_tables_in_one_call(dtype: torch.dtype, last: bool, bags: int) -> None:
    real, ours = many(mode="sum", include_last_offset=last)
    counts = [torch.randint(0, 4, (bags,)) for _ in range(3)]
    starts = [F.pad(torch.cumsum(x, 0), (1, 0)).to(dtype) for x in counts]
    indices = [torch.randint(0, 9, (int(x[-1]),), dtype=dtype) for x in starts]
    offsets = starts if last else [x[:-1].clone() for x in starts]
    weights = [torch.randn(len(x)) for x in indices]
    with torch.no_grad():
        assert torch.allclose(ours(indices, offsets), real(indices, offsets), atol=1e-5)
        want = real(indices, offsets, weights)
        assert torch.allclose(ours(indices, offsets, weights), want, atol=1e-5)
        stacked = torch.randint(0, 9, (3, bags, 2), dtype=dtype)
        assert torch.allclose(ours(stacked), real(stacked), atol=1e-5)
        one = torch.arange(bags + last, dtype=dtype).repeat(3, 1)
        got = ours(stacked[:, :, 0].contiguous(), one)
        assert torch.allclose(got, real(stacked[:, :, 0], one), atol=1e-5)


def test_whoever_watches_sees_the_operator() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    table = WeightOnlyEmbeddingBag.from_float(nn.EmbeddingBag(20, 8, mode="sum"), bits=8)
    indices, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    want = table(indices, offsets)
    with Seen() as seen:
        assert torch.equal(table(indices, offsets), want)
    assert "x86quant::embedding_bags" in seen.names
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(lambda x: table(x.unsqueeze(0)))(torch.tensor([[1, 2], [3, 4]]))


def test_the_short_way_takes_tensors_alone() -> None:
    try_look_up = extension.native().try_look_up
    rows = quantize_rows_of_table(torch.randn(20, 8), 8)
    numbers = list(WeightOnlyEmbeddingBag(rows, "sum").form.numbers)
    indices = torch.tensor([[1, 2]])
    good = [[rows], [indices], [], [], numbers, ["t"], False]
    assert torch.equal(try_look_up(*good), extension.native().look_up_bags(*good))
    for place, wrong in ((0, rows), (1, None), (4, ["a"]), (4, 7), (5, [1]), (5, "t")):
        with pytest.raises(TypeError):
            try_look_up(*good[:place], wrong, *good[place + 1 :])
    for place, wrong in ((0, []), (1, []), (4, numbers[1:]), (4, [1 << 40] * 7), (5, [])):
        with pytest.raises(ValueError, match="x86quant"):
            try_look_up(*good[:place], wrong, *good[place + 1 :])
    with pytest.raises(TypeError):
        try_look_up(*good[:-1])

    class Own(torch.Tensor):
        pass

    for other in (None, 3, indices.as_subclass(Own), indices.numpy()):
        assert try_look_up([rows], [other], *good[2:]) is None


def test_the_table_that_is_wrong_is_named() -> None:
    model = nn.ModuleDict({"sparse": many(None, mode="sum")[0]})
    ours = to_dynamic(model, embeddings=8)["sparse"]
    good = torch.zeros(3, 5, 1, dtype=torch.int64)
    wrong = good.clone()
    wrong[1, 3] = 40
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with pytest.raises(InvalidInputError, match=r"sparse.tables.1: index 40 at position 3 is"):
            ours(wrong)
    torch.set_num_threads(1)
    with pytest.raises(InvalidInputError, match=r"tables\.2 has 4 bags, but .*tables\.0 has 5"):
        ours([good[0], good[1], good[2, :4]])
    for bad, message in (
        (good[:2], "the first dimension of indices is 2"),
        ([good[0]] * 2, "there are 3 tables, but indices for 2"),
        (good.float(), "indices must be int32 or int64"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            ours(bad)
    with pytest.raises(InvalidInputError, match="offsets must be of the type of the indices"):
        ours(good[:, :, 0], torch.arange(5).int().repeat(3, 1))
    with pytest.raises(InvalidInputError, match=r"at least one nn\.EmbeddingBag, with the same"):
        EmbeddingBags([nn.EmbeddingBag(4, 2), nn.EmbeddingBag(4, 2, include_last_offset=True)])


def test_the_plain_operator_computes_and_refuses_the_same() -> None:
    _, ours = many(mode="mean", padding_idx=1)
    rows = [table.rows for table in ours.tables]
    formats = [n for table in ours.tables for n in table.form.numbers]
    names = ["a", "b", ""]
    plain, op = embedding_bags, torch.ops.x86quant.embedding_bags
    indices, offsets = [torch.tensor([1, 4, 8])] * 3, [torch.tensor([0, 0, 2])] * 3
    want = op(rows, indices, offsets, [], formats, names)
    assert torch.allclose(plain(rows, indices, offsets, [], formats, names), want, atol=1e-6)
    for bad, starts in (([1, 9, 8], [0, 0, 2]), ([1, 4, 8], [0, 4, 2]), ([1, 4, 8], [1, 2, 3])):
        operands: Any = (
            rows,
            [torch.tensor(bad)] * 3,
            [torch.tensor(starts)] * 3,
            [],
            formats,
            names,
        )
        messages = []
        for function in (plain, op):
            with pytest.raises(InvalidInputError) as found:
                function(*operands)
            messages.append(str(found.value))
        assert messages[0] == messages[1]
        assert "the table a: " in messages[0]
    with pytest.raises(InvalidInputError, match="is refused"):
        op(rows, indices, offsets, [], [*formats[:7], 8, 5, *formats[9:]], names)


# ------------------------------------------------------------------------- whole models


class SmallDlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.tables = EmbeddingBags([nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3)])
        self.interaction = DotInteraction()
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.interaction(self.bottom(dense), self.tables(indices)))
        return out


def small_batch(samples: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 5), torch.randint(0, 50, (3, samples, 2))


@pytest.mark.usefixtures("any_accuracy")
@pytest.mark.parametrize("bits", BITS)
def test_a_dlrm_is_one_graph(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SmallDlrm().eval()
    batches = [small_batch() for _ in range(4)]
    ours = x86quant.quantize(model, batches, embedding_bits=bits, speed_check=False, progress=False)
    assert isinstance(ours, x86quant.CompiledModule)
    assert f"3 tables have rows in {bits} bits" in str(ours.quantization)
    x = small_batch(9)
    exact_tables = copy.deepcopy(model)
    for bag in exact_tables.tables.tables:
        bag.weight = nn.Parameter(
            WeightOnlyEmbeddingBag.from_float(bag, bits=bits).weight.dequantize()
        )
    with torch.no_grad():
        want, got = exact_tables(*x), ours(*x)
        assert (want - got).square().mean() < 0.01 * want.square().mean()
    x86quant.assert_int8(ours, x)
    kernels = {choice.op: choice.kernel for choice in x86quant.explain(ours)}
    assert kernels["interact_bags"] == "native"
    x86quant.save(ours, tmp_path / "dlrm.x86q")
    again = x86quant.load(tmp_path / "dlrm.x86q")
    with torch.no_grad():
        assert torch.equal(again(*x), got)
    wrong = x[1].clone()
    wrong[1, 1, 1] = 50
    with pytest.raises(InvalidInputError, match=r"tables\.1: index 50 at position 3 is not in"):
        ours(x[0], wrong)


@pytest.mark.parametrize("mode", ["dynamic", "weight_only"])
def test_tables_of_dynamic_models(mode: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, 16), nn.Linear(16, 3))
    ours = x86quant.quantize(model, None, mode=mode, embedding_bits=4, speed_check=False)
    assert isinstance(ours[0], RowwiseEmbedding)
    ids = torch.randint(0, ROWS, (2, 3))
    x86quant.save(ours, tmp_path / "model.x86q")
    with torch.no_grad():
        assert torch.equal(x86quant.load(tmp_path / "model.x86q")(ids), ours(ids))
    assert x86quant.explain(ours)[0].shape == f"{ROWS}×16, 4 bits"
    with pytest.raises(InvalidInputError, match="embedding_bits must be 8, 4, 2 or None, not 3"):
        x86quant.quantize(model, None, mode=mode, embedding_bits=3)


def test_interactions_refuse_what_does_not_fit() -> None:
    with pytest.raises(InvalidInputError, match="takes float32"):
        torch.ops.x86quant.interact(torch.randn(2, 4), torch.randn(2, 3, 5))
    assert DotInteraction()(torch.randn(2, 4), torch.randn(2, 12)).shape == (2, 4 + 6)


def test_interactions_have_gradients() -> None:
    torch.manual_seed(0)
    dense, rows = torch.randn(2, 3, requires_grad=True), torch.randn(2, 2, 3, requires_grad=True)
    DotInteraction()(dense, rows).square().sum().backward()
    x, y = (leaf.detach().clone().requires_grad_() for leaf in (dense, rows))
    products = [x * y[:, 0], x * y[:, 1], y[:, 0] * y[:, 1]]
    (x.square().sum() + sum(p.sum(1).square().sum() for p in products)).backward()
    assert torch.allclose(dense.grad, x.grad, atol=1e-5)
    assert torch.allclose(rows.grad, y.grad, atol=1e-5)


# ------------------------------------------------------------------------- torchrec's tables


def table_batched(specs: list[tuple[int, int, str]], **options: Any) -> Any:
    """FBGEMM's module: rows, size and type of each table."""
    home = "fbgemm_gpu.split_table_batched_embeddings_ops_"
    types = importlib.import_module("fbgemm_gpu.split_embedding_configs").SparseType
    common = importlib.import_module(f"{home}common")
    options["pooling_mode"] = common.PoolingMode[options.get("pooling_mode", "SUM")]
    module = importlib.import_module(f"{home}inference").IntNBitTableBatchedEmbeddingBagsCodegen(
        [(f"t{i}", rows, size, types[kind], common.EmbeddingLocation.HOST)
         for i, (rows, size, kind) in enumerate(specs)],
        device="cpu", output_dtype=types.FP32, **options,
    )  # fmt: skip
    module.fill_random_weights()
    torch.manual_seed(0)
    for rows, _ in module.split_embedding_weights(split_scale_shifts=False):
        rows[:, :4] = torch.randn(len(rows), 2).half().view(torch.uint8)  # scale and bias
    return module


def same_bags(module: Any, ours: EmbeddingBags, features: int, rows: int) -> None:
    """Compare some bags of all features."""
    bags = 6
    counts = torch.randint(0, 4, (features * bags,))
    offsets = F.pad(torch.cumsum(counts, 0), (1, 0)).int()
    indices = torch.randint(0, rows, (int(offsets[-1]),)).int()
    want = module(indices, offsets)
    starts = [offsets[bags * i : bags * (i + 1) + 1] for i in range(features)]
    got = ours([indices[int(x[0]) : int(x[-1])] for x in starts], [x[:-1] - x[0] for x in starts])
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["INT8", "INT4", "INT2"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_the_state_of_table_batched_modules(kind: str, pooling: str, tmp_path: Path) -> None:
    module = table_batched(
        [(50, 8, kind), (30, 16, kind)], feature_table_map=[0, 1, 0], pooling_mode=pooling
    )
    ours = x86quant.from_table_batched(module)
    same_bags(module, ours, features=3, rows=30)
    assert ours.tables[0] is ours.tables[2]
    with pytest.raises(InvalidInputError, match="the table t1: index 30 at position 0 is not in"):
        ours(torch.full((3, 1, 1), 30))
    path = tmp_path / "tables.x86q"
    x86quant.save(nn.Sequential(ours.tables[1]).eval(), path)
    again = x86quant.load(path)
    some = torch.tensor([[1, 2], [29, 0]])
    assert torch.equal(again(some), ours.tables[1](some))
    assert ours.tables[1].half()(some).dtype == torch.float16


@pytest.mark.parametrize("alignment", [1, 16, 32])
def test_table_batched_modules_of_many_types_and_alignments(alignment: int) -> None:
    """As torchrec fills them: other widths side by side, rows that end in padding."""
    specs = [(50, 8, "INT8"), (40, 20, "INT4"), (30, 16, "INT2"), (30, 32, "INT8")]
    module = table_batched(specs, row_alignment=alignment)
    again = table_batched(specs, row_alignment=alignment)
    for rows, _ in again.split_embedding_weights(split_scale_shifts=False):
        rows.fill_(255)
    again.assign_embedding_weights(module.split_embedding_weights())
    ours = x86quant.from_table_batched(again)
    assert [table.rows.shape[1] % alignment for table in ours.tables] == [0] * 4
    same_bags(module, ours, features=4, rows=30)


def test_table_batched_modules_that_cannot_be_read() -> None:
    pruned = torch.tensor([0, -1, 1, 2])
    for as_array in (True, False):
        options = {"index_remapping": [pruned], "use_array_for_index_remapping": as_array}
        with pytest.raises(UnsupportedError, match="indices are remapped"):
            x86quant.from_table_batched(table_batched([(3, 8, "INT8")], **options))
    with pytest.raises(UnsupportedError, match="behind the codes"):
        x86quant.from_table_batched(table_batched([(3, 8, "INT8")], reverse_qparam=True))
    with pytest.raises(UnsupportedError, match="the table t1 is in FP16 with 4 bytes"):
        x86quant.from_table_batched(table_batched([(3, 8, "INT8"), (3, 8, "FP16")]))
    with pytest.raises(UnsupportedError, match="with 8 bytes of scale and bias"):
        x86quant.from_table_batched(table_batched([(3, 8, "INT8")], scale_bias_size_in_bytes=8))
    with pytest.raises(UnsupportedError, match="sum or mean, not NONE"):
        x86quant.from_table_batched(table_batched([(3, 8, "INT8")], pooling_mode="NONE"))
