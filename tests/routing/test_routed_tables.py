"""Bags of embeddings by the rules: which kernel runs, and indices checked before either does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.dynamic import WeightOnlyEmbeddingBag
from x86quant.dynamic.embedding_bag import quantize_rows_of_table
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.hardware.cpu import cpu
from x86quant.kernels import lookup_kernels
from x86quant.packing.embedding_tables import lookup_routes
from x86quant.routing.router import choose
from x86quant.spec import lookup_spec
from x86quant.tables.shipped import find_table
from x86quant.tables.table_reader import read_table

ROWS, DIM, BAGS, EACH = 60, 24, 12, 5


def indices() -> torch.Tensor:
    return torch.randint(0, ROWS, (BAGS * EACH,), generator=torch.Generator().manual_seed(0))


OFFSETS = torch.arange(0, BAGS * EACH, EACH)


def table(bits: int = 8, mode: str = "sum", **options: Any) -> WeightOnlyEmbeddingBag:
    torch.manual_seed(0)
    rows = quantize_rows_of_table(torch.randn(ROWS, DIM), bits)
    return WeightOnlyEmbeddingBag(rows, mode, bits=bits, **options)


def by_fbgemm(module: WeightOnlyEmbeddingBag) -> WeightOnlyEmbeddingBag:
    with x86quant.override("fbgemm", op="embedding_bag"):
        x86quant.reroute(module)
        assert [choice.kernel for choice in module.routes.choices] == ["fbgemm"]
    return module


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_both_kernels_give_the_same_bytes(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.rand(BAGS * EACH)
    last = torch.cat([OFFSETS, torch.tensor([BAGS * EACH])])
    calls: list[tuple[tuple[torch.Tensor, ...], bool]] = [
        ((indices().to(dtype), OFFSETS.to(dtype)), False),
        ((indices().to(dtype).view(BAGS, EACH),), False),
        ((indices().to(dtype), last.to(dtype)), True),
        ((indices().to(dtype), OFFSETS.to(dtype), weights), False),
        ((indices().to(dtype).view(BAGS, EACH), None, weights.view(BAGS, EACH)), False),  # type: ignore[list-item]
    ]
    for call, ends in calls:
        native = table(bits, include_last_offset=ends)(*call)
        other = by_fbgemm(table(bits, include_last_offset=ends))
        with monkeypatch.context() as patch:  # the stock operator runs, not ours
            patch.setattr("x86quant.dynamic.embedding_bag.look_up", None)
            assert torch.equal(other(*call), native)


def test_the_rules_and_an_override_choose() -> None:
    with x86quant.use_rules("default"):  # whatever this CPU's own say
        module = table()
        module(indices(), OFFSETS)
        (choice,) = module.routes.choices
        assert choice.kernel == "native"
        assert choice.rule.startswith("default#")
        assert pickle.loads(pickle.dumps(module)).routes.choices[0].kernel == "native"
    with x86quant.use_rules("pytorch-2.0"):
        x86quant.reroute(module)
        assert module.routes.choices[0].kernel == "fbgemm"
    assert "embedding_bag 60×24, 8 bits, sum" in str(x86quant.explain(module))


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"pooling": "mean"}, "sum the rows"),
        ({"pooling": "max"}, "sum the rows"),
        ({"skips": True}, "counts for nothing"),
        ({"stock_rows": False}, "scale and bias behind"),
    ],
)
def test_what_fbgemm_cannot_is_said_in_words(given: dict[str, Any], word: str) -> None:
    spec = lookup_spec(ROWS, DIM, 8, **{"pooling": "sum", "stock_rows": True, **given})
    reasons = lookup_kernels()["fbgemm"].not_supported_reasons(spec, cpu())
    assert len(reasons) == 1
    assert word in reasons[0]
    with x86quant.use_rules("pytorch-2.0"):
        assert lookup_routes(spec).kernels == ("native",)
    with (
        x86quant.override("fbgemm", op="embedding_bag", caller="graph"),
        pytest.raises(UnsupportedError, match=word),
    ):
        lookup_routes(spec)


WRONG: list[tuple[list[int], list[int], str]] = [
    ([5, ROWS], [0], "index 60 at position 1"),
    ([-1, 5], [0], "index -1 at position 0"),
    ([1, 2, 3], [0, 2, 1], "offset 2 is less"),
    ([1, 2, 3], [1], "offsets must start with 0"),
    ([1, 2, 3], [0, 4], "offset 1 is"),
]


@pytest.mark.parametrize(("rows", "offsets", "message"), WRONG)
def test_wrong_indices_are_found_before_fbgemm_reads(
    rows: list[int], offsets: list[int], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        by_fbgemm(table())(torch.tensor(rows), torch.tensor(offsets))


# --- behind the stock engine ---


def stock_bag(bits: int) -> nn.Module:
    ao = torch.ao.quantization
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
    name = "float_qparams_weight_only_qconfig" + ("_4bit" if bits == 4 else "")
    bag.qconfig = getattr(ao, name)  # type: ignore[assignment]
    found: nn.Module = torch.ao.nn.quantized.EmbeddingBag.from_float(bag)
    return found


@pytest.fixture(autouse=True)
def _engine() -> Any:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "x86"
    yield
    torch.backends.quantized.engine = before


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kernel", ["native", "fbgemm"])
def test_a_stock_module_looks_up_by_the_rules(bits: int, kernel: str) -> None:
    stock = stock_bag(bits)
    with x86quant.enable(), x86quant.override(kernel, op="embedding_bag"):
        routed = stock_bag(bits)
    (choice,) = x86quant.explain(routed)
    assert (choice.op, choice.kernel) == ("embedding_bag", kernel)
    assert next(iter(x86quant.explain(stock))).routed is False
    weights = torch.rand(BAGS * EACH)
    for call in (
        (indices(), OFFSETS),
        (indices().int(), OFFSETS.int()),
        (indices().view(BAGS, EACH),),
        (indices(), OFFSETS, weights),
        (indices()[:0], OFFSETS[:1] * 0),
    ):
        assert torch.equal(routed(*call), stock(*call))
    for rows, offsets, message in WRONG:
        with pytest.raises(ValueError, match=message):
            routed(torch.tensor(rows), torch.tensor(offsets))
    for other in (copy.deepcopy(routed), pickle.loads(pickle.dumps(routed))):
        assert torch.equal(other(indices(), OFFSETS), routed(indices(), OFFSETS))
    with x86quant.override(kernel, op="embedding_bag"):
        x86quant.reroute(stock)
    assert next(iter(x86quant.explain(stock))).kernel == kernel


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_stock_lookups_are_chosen_by_what_was_measured_on_cpus_like_this_one(vendor: str) -> None:
    measured = {"AuthenticAMD": "fbgemm", "GenuineIntel": "native"}[vendor]
    table = read_table(find_table("default"))
    here = dataclasses.replace(cpu(), vendor=vendor)
    for caller, kernel in (("stock", measured), ("graph", "native")):
        spec = lookup_spec(ROWS, DIM, 8, "sum", stock_rows=True, caller=caller)
        assert choose(spec, cpu=here, table=table, kernels=lookup_kernels()).kernel == kernel


def test_offsets_are_whole_numbers() -> None:
    table = WeightOnlyEmbeddingBag(quantize_rows_of_table(torch.randn(ROWS, DIM), 8), "sum")
    with pytest.raises(InvalidInputError, match=r"offsets must be int32 or int64, got torch.float"):
        table(indices(), OFFSETS.float())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_stock_embedding_is_checked_too(bits: int) -> None:
    op = getattr(torch.ops.quantized, "embedding_byte" if bits == 8 else "embedding_4bit")
    stock = stock_bag(bits)._packed_params._packed_weight  # type: ignore[union-attr]
    with x86quant.enable():
        routed = stock_bag(bits)._packed_params._packed_weight  # type: ignore[union-attr]
    for shape in ((BAGS, EACH), (BAGS * EACH,)):
        assert torch.equal(op(routed, indices().view(shape)), op(stock, indices().view(shape)))
    with pytest.raises(ValueError, match="index 60 at position 1"):
        op(routed, torch.tensor([0, ROWS]))
