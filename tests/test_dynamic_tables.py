"""Embeddings and bags of embeddings out of int8 tables: values, forms of input, bad indices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.dynamic import WeightOnlyEmbedding, WeightOnlyEmbeddingBag, to_dynamic
from x86quant.errors import InvalidInputError

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


def test_exported_bags_run_in_float() -> None:
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
