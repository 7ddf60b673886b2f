"""Recommenders as people write them: one native program, in each spelling; and their bad inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.op_checks import check_ops
from x86quant.compiled.compiled_parts import whole_graph
from x86quant.errors import InvalidInputError
from x86quant.lowering.graph_tools import is_op, op_name

TABLES, ROWS, SIZE = 5, 50, 16
COUNT = TABLES + 1
Batch = tuple[torch.Tensor, ...]

pytestmark = pytest.mark.usefixtures("any_accuracy")


class Plain(nn.Module):
    """A DLRM in torch alone; ``interact`` is how its dot products are spelled."""

    def __init__(self, interact: Callable[..., torch.Tensor], products: int = 15) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, SIZE), nn.ReLU())
        bags = (nn.EmbeddingBag(ROWS, SIZE, mode="sum") for _ in range(TABLES))
        self.tables = nn.ModuleList(bags)
        wide = SIZE + products
        self.top = nn.Sequential(nn.Linear(wide, 32), nn.ReLU(), nn.Linear(32, 1))
        self.interact = interact

    def rows(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """What is looked up."""
        return [table(indices[:, i : i + 1]) for i, table in enumerate(self.tables)]

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        first = self.bottom(dense)
        out: torch.Tensor = self.top(self.interact(first, self.rows(indices)))
        return out


def lower_triangle(first: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    every = torch.stack([first, *rows], 1)
    products = torch.bmm(every, every.transpose(1, 2))
    row, column = torch.tril_indices(COUNT, COUNT, -1)
    return torch.cat([first, products[:, row, column]], 1)


def of_the_reference(first: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """As facebookresearch/dlrm has it, which asks for the number of vectors."""
    batch_size, d = first.shape
    t = torch.cat([first, *rows], dim=1).view((batch_size, -1, d))
    z = torch.bmm(t, torch.transpose(t, 1, 2))
    _, ni, nj = z.shape
    li = torch.tensor([i for i in range(ni) for j in range(i)])
    lj = torch.tensor([j for i in range(nj) for j in range(i)])
    return torch.cat([first, z[:, li, lj]], dim=1)


def of_torchrec(first: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """As torchrec's InteractionArch has it."""
    sparse = torch.stack(rows, 1)
    combined = torch.cat((first.unsqueeze(1), sparse), dim=1)
    products = torch.bmm(combined, torch.transpose(combined, 1, 2))
    indices = torch.triu_indices(COUNT, COUNT, offset=1)
    return torch.cat((first, products[:, indices[0], indices[1]]), dim=1)


def by_matmul(first: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    every = torch.stack((first, *rows), dim=-2)
    products = every @ every.mT
    row, column = torch.tril_indices(COUNT, COUNT, -1)
    return torch.cat([first, products[:, column, row]], -1)


def some_pairs(first: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    every = torch.stack([first, *rows], 1)
    products = torch.matmul(every, every.permute(0, 2, 1))
    return torch.cat([first, products[:, torch.tensor([5, 0, 2]), torch.tensor([1, 3, 4])]], 1)


def with_itself(first: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """As the reference has it with ``arch_interaction_itself``."""
    every = torch.cat([first, *rows], dim=1).view((first.shape[0], -1, first.shape[1]))
    z = torch.bmm(every, torch.transpose(every, 1, 2))
    _, ni, nj = z.shape
    li = torch.tensor([i for i in range(ni) for j in range(i + 1)])
    lj = torch.tensor([j for i in range(nj) for j in range(i + 1)])
    return torch.cat([first, z[:, li, lj]], dim=1)


SPELLINGS: dict[Callable[..., torch.Tensor], int] = {
    lower_triangle: 15, of_the_reference: 15, of_torchrec: 15, by_matmul: 15, some_pairs: 3,
    with_itself: 21,
}  # fmt: skip


def batch(samples: int = 24, dtype: torch.dtype = torch.int64) -> Batch:
    return torch.randn(samples, 4), torch.randint(0, ROWS, (samples, TABLES), dtype=dtype)


def quantized(model: nn.Module, data: list[Any], **options: Any) -> x86quant.CompiledModule:
    found = guarded(model, data, **options)
    assert isinstance(found, x86quant.CompiledModule), found.quantization
    return found


def graph_by_torch(model: nn.Module, call: tuple[Any, ...]) -> torch.Tensor:
    """What the graph gives without native programs."""
    other = copy.deepcopy(model)
    program = program_of(other)
    for name, _ in list(program.runtime.named_children()):
        segment = program.runtime.get_submodule(name)
        program.runtime.set_submodule(name, segment.graph_module)
    found: torch.Tensor = other(*call)
    return found


def program_of(model: nn.Module) -> x86quant.CompiledModule:
    """Without the check of sizes that may be in front of it."""
    found = whole_graph(model)
    assert isinstance(found, x86quant.CompiledModule), found
    return found


def guarded(model: nn.Module, data: list[Any], **options: Any) -> Any:
    return x86quant.quantize(model.eval(), data, speed_check=False, progress=False, **options)


def ops_of(model: x86quant.CompiledModule) -> list[str]:
    return [op_name(node) for node in model.graph_module.graph.nodes if is_op(node)]


def noise(model: nn.Module, ours: nn.Module, call: Batch) -> float:
    with torch.no_grad():
        want, got = model(*call), ours(*call)
    assert got.shape == want.shape
    return float((want - got).square().mean() / want.square().mean())


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("bits", [None, 8])
def test_a_plain_dlrm_is_one_program(
    spelling: Callable[..., torch.Tensor], bits: int | None, tmp_path: Path
) -> None:
    model = Plain(spelling, SPELLINGS[spelling])
    ours = guarded(model, [batch() for _ in range(4)], embedding_bits=bits)
    program = program_of(ours)
    assert ops_of(program).count("interact_bags") == 1
    assert not {"embedding_bags", "interact"} & set(ops_of(program))
    segments = [name for name, _ in program.runtime.named_children()]
    assert segments == ["segment_0"]  # and torch runs nothing
    assert program.float_nodes == ()
    for samples in (1, 7, 100):
        assert noise(model, ours, batch(samples)) < 0.005
    x86quant.assert_int8(ours, batch())
    assert {c.op: c.kernel for c in x86quant.explain(ours)}["interact_bags"] == "native"
    call = batch(33)
    x86quant.save(ours, tmp_path / "dlrm.x86q")
    with torch.no_grad():
        assert torch.equal(x86quant.load(tmp_path / "dlrm.x86q")(*call), ours(*call))


def test_the_native_step_is_the_plain_op() -> None:
    for spelling in (lower_triangle, some_pairs):
        ours = quantized(Plain(spelling, SPELLINGS[spelling]), [batch() for _ in range(2)])
        for samples in (1, 5, 70):
            for found in check_ops(ours.graph_module, batch(samples)):
                assert found.steps <= 1, found


def test_an_index_that_is_wrong_is_named() -> None:
    for dtype in (torch.int64, torch.int32):
        data = [batch(dtype=dtype) for _ in range(2)]
        ours = quantized(Plain(lower_triangle), data, embedding_bits=4)
        for samples, value in ((24, ROWS), (90, -1)):
            dense, indices = batch(samples, dtype)
            ours(dense, indices)
            indices[samples - 2, 3] = value
            message = f"the table tables.3: index {value} at position {samples - 2} is not in 0..49"
            for _ in range(2):  # the second call takes the short way
                with pytest.raises(InvalidInputError, match=message):
                    ours(dense, indices)
            indices[samples - 2, 3] = 0
            assert ours(dense, indices).shape == (samples, 1)  # nothing is left behind
    with pytest.raises(InvalidInputError, match="24 samples, but 23 bags"):
        ours(torch.randn(24, 4), batch(23, torch.int32)[1])
    assert ours(*batch(0, torch.int32)).shape == (0, 1)


class Bagged(Plain):
    """The same with lists of indices and offsets."""

    def forward(  # type: ignore[override]
        self, dense: torch.Tensor, indices: list[torch.Tensor], offsets: list[torch.Tensor]
    ) -> torch.Tensor:
        rows = [t(i, o) for t, i, o in zip(self.tables, indices, offsets, strict=True)]
        out: torch.Tensor = self.top(self.interact(self.bottom(dense), rows))
        return out


def ragged(samples: int = 24) -> tuple[Any, ...]:
    """Bags of 0 to 4, of another number in each table."""
    counts = torch.randint(0, 5, (TABLES, samples))
    offsets = [torch.cumsum(row, 0) - row for row in counts]
    indices = [torch.randint(0, ROWS, (int(row.sum()),)) for row in counts]
    return torch.randn(samples, 4), indices, offsets


def test_bags_of_any_number_need_no_plan_each() -> None:
    model = Bagged(lower_triangle)
    ours = x86quant.quantize(
        model.eval(), [ragged() for _ in range(3)], speed_check=False, progress=False
    )
    assert noise(model, ours, ragged()) < 0.005
    compiled = ours if isinstance(ours, x86quant.CompiledModule) else ours.compiled
    before = [len(m.plans) for m in compiled.runtime.children() if hasattr(m, "plans")]
    for _ in range(4):
        ours(*ragged())
    assert [len(m.plans) for m in compiled.runtime.children() if hasattr(m, "plans")] == before
    dense, indices, offsets = ragged()
    indices[2][-1] = ROWS
    with pytest.raises(InvalidInputError, match=r"tables\.2: index 50 at position"):
        ours(dense, indices, offsets)


class Stacked(Plain):
    """The same with one tensor of indices and one of offsets for all tables."""

    def forward(  # type: ignore[override]
        self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        rows = [table(indices[i], offsets[i]) for i, table in enumerate(self.tables)]
        out: torch.Tensor = self.top(self.interact(self.bottom(dense), rows))
        return out


def test_stacked_bags_are_in_the_program() -> None:
    def data(samples: int = 20) -> Batch:
        indices = torch.randint(0, ROWS, (TABLES, 2 * samples))
        return torch.randn(samples, 4), indices, (2 * torch.arange(samples)).repeat(TABLES, 1)

    model = Stacked(lower_triangle)
    ours = quantized(model, [data() for _ in range(3)], embedding_bits=8)
    assert [name for name, _ in ours.runtime.named_children()] == ["segment_0"]
    assert noise(model, ours, data(9)) < 0.005
    dense, indices, offsets = data(9)
    offsets[1, 4] = 3
    with pytest.raises(InvalidInputError, match=r"tables\.1: offset 4 is less than the one before"):
        ours(dense, indices, offsets)


class Reference(Plain):
    """As facebookresearch/dlrm has it: lookups by a loop over the indices of each table."""

    def __init__(self, interact: Callable[..., torch.Tensor]) -> None:
        super().__init__(interact)
        self.top.append(nn.Sigmoid())

    def forward(  # type: ignore[override]
        self, dense: torch.Tensor, offsets: Any, indices: Any
    ) -> torch.Tensor:
        x = self.bottom(dense)
        rows = []
        for k, group in enumerate(indices):
            starts = None if offsets is None else offsets[k]
            rows.append(self.tables[k](group, starts, per_sample_weights=None))
        out: torch.Tensor = self.top(self.interact(x, rows))
        return out


class ByNumber(Reference):
    """The same with a constant number of tables and pairs."""

    def forward(self, dense: torch.Tensor, offsets: Any, indices: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(dense, offsets, [indices[i] for i in range(TABLES)])


def in_lists(samples: int = 20) -> tuple[Any, ...]:
    dense, indices, offsets = ragged(samples)
    return dense, offsets, indices


def offsets_stacked(samples: int = 20) -> tuple[Any, ...]:
    dense, indices, offsets = ragged(samples)
    return dense, torch.stack(offsets), indices


def all_stacked(samples: int = 20) -> tuple[Any, ...]:
    starts = (2 * torch.arange(samples)).repeat(TABLES, 1)
    return torch.randn(samples, 4), starts, torch.randint(0, ROWS, (TABLES, 2 * samples))


def bags_stacked(samples: int = 20) -> tuple[Any, ...]:
    return torch.randn(samples, 4), None, torch.randint(0, ROWS, (TABLES, samples, 3))


@pytest.mark.parametrize("data", [in_lists, offsets_stacked, all_stacked, bags_stacked])
@pytest.mark.parametrize("bits", [None, 8])
def test_the_reference_comes_to_the_same_program(
    data: Callable[..., tuple[Any, ...]], bits: int | None, tmp_path: Path
) -> None:
    """As with constant pairs: lookups of one call, whatever number of indices they have."""
    calls = [data() for _ in range(3)]
    ours = guarded(Reference(of_the_reference), calls, embedding_bits=bits)
    plain = guarded(ByNumber(lower_triangle), calls, embedding_bits=bits)
    program, want = map(program_of, (ours, plain))
    assert ops_of(program) == ops_of(want)
    assert ops_of(program).count("interact_bags") == 1
    assert [name for name, _ in program.runtime.named_children()] == ["segment_0"]
    x86quant.save(ours, tmp_path / "dlrm.x86q")
    loaded = x86quant.load(tmp_path / "dlrm.x86q")
    for samples in (20, 1, 2, 7, 64):
        call = data(samples)
        with torch.no_grad():
            assert torch.equal(ours(*call), plain(*call))
            assert torch.equal(loaded(*call), ours(*call))
    assert ours.outside == 0


@pytest.mark.parametrize("bits", [None, 8])
def test_lists_of_any_number_of_indices_share_a_plan(bits: int | None) -> None:
    calls = [in_lists() for _ in range(3)]
    ours = guarded(ByNumber(lower_triangle), calls, embedding_bits=bits)
    program = program_of(ours)
    segment = program.runtime.get_submodule("segment_0")
    for call in [*calls, in_lists(), in_lists()]:
        dense, offsets, indices = call
        apart = [torch.stack([x, x], 1)[:, 0] for x in indices]
        with torch.no_grad():
            plain = graph_by_torch(ours, call)
            assert torch.equal(ours(*call), plain)
            assert torch.equal(ours(*call), plain)  # past the planner
        assert len(segment.plans) == 1
    with torch.no_grad():
        assert torch.equal(ours(dense, offsets, apart), plain)
    for at, value, text in (
        (-1, ROWS, rf"index {ROWS} at position {len(indices[1]) - 1} is not in"),
        (0, -1, "index -1 at position 0 is not in"),
    ):
        wrong = [x.clone() for x in indices]
        wrong[1][at] = value
        with pytest.raises(InvalidInputError, match=rf"tables\.1: {text}"):
            ours(dense, offsets, wrong)
    none = [indices[0][:0], *indices[1:]], [torch.zeros_like(offsets[0]), *offsets[1:]]
    with torch.no_grad():
        assert torch.equal(
            ours(dense, none[1], none[0]), graph_by_torch(ours, (dense, *none[::-1]))
        )
    count = len(indices[2])
    late = [x.clone() for x in offsets]
    late[2][-1] = count + 1
    with pytest.raises(InvalidInputError, match=rf"tables\.2: offset 19 .* the {count} indices"):
        ours(dense, late, indices)
    with torch.no_grad():
        assert torch.equal(ours(*call), plain)


class Weighted(Plain):
    """With weights of samples, which are as many as the indices."""

    def forward(  # type: ignore[override]
        self, dense: torch.Tensor, indices: Any, offsets: Any, weights: Any
    ) -> torch.Tensor:
        calls = zip(self.tables, indices, offsets, weights, strict=True)
        rows = [table(*own) for table, *own in calls]
        out: torch.Tensor = self.top(self.interact(self.bottom(dense), rows))
        return out


def weighted(samples: int = 24) -> tuple[Any, ...]:
    dense, indices, offsets = ragged(samples)
    return dense, indices, offsets, [torch.randn(len(x)) for x in indices]


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_weights_of_samples_are_in_the_program(bits: int | None, tmp_path: Path) -> None:
    """Of any number, as the indices are: one plan serves."""
    model = Weighted(lower_triangle)
    ours = guarded(model, [weighted() for _ in range(3)], embedding_bits=bits)
    program = program_of(ours)
    assert [name for name, _ in program.runtime.named_children()] == ["segment_0"]
    assert {c.op: c.kernel for c in x86quant.explain(ours)}["interact_bags"] == "native"
    x86quant.save(ours, tmp_path / "dlrm.x86q")
    loaded = x86quant.load(tmp_path / "dlrm.x86q")
    segment = program.runtime.get_submodule("segment_0")
    with torch.no_grad():
        ours(*weighted())
    before = segment.plans  # saving tried other sizes
    for _ in range(4):
        call = dense, indices, offsets, weights = weighted()
        assert noise(model, ours, call) < 0.03
        with torch.no_grad():
            want = graph_by_torch(ours, call)
            for found in (ours, ours, loaded):  # the second call goes past the planner
                assert torch.equal(found(*call), want)
        assert segment.plans == before
    x86quant.assert_int8(ours, call)
    apart = [torch.stack([x, x], 1)[:, 0] for x in weights]  # not one behind the other
    with torch.no_grad():
        assert torch.equal(ours(dense, indices, offsets, apart), want)
    assert segment.plans == before
    for wrong in (weights[2][:-1], torch.cat([weights[2], torch.ones(1)])):
        text = rf"tables\.2: there are {len(wrong)} per_sample_weights for {len(indices[2])} ind"
        for samples in (dense, dense):
            with pytest.raises(InvalidInputError, match=text):
                ours(samples, indices, offsets, [*weights[:2], wrong, *weights[3:]])
    with torch.no_grad():
        assert torch.equal(ours(*call), want)


class FixedWeights(Plain):
    """Bags of one size, with weights of samples."""

    def forward(  # type: ignore[override]
        self, dense: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        tables = enumerate(self.tables)
        rows = [t(indices[:, i], per_sample_weights=weights[:, i]) for i, t in tables]
        out: torch.Tensor = self.top(self.interact(self.bottom(dense), rows))
        return out


def test_a_wrong_number_of_weights_is_said_when_it_is_planned() -> None:
    def data(samples: int = 20, each: int = 3) -> Batch:
        indices = torch.randint(0, ROWS, (samples, TABLES, 3))
        return torch.randn(samples, 4), indices, torch.randn(samples, TABLES, each)

    model = FixedWeights(lower_triangle)
    ours = program_of(guarded(model, [data() for _ in range(3)], embedding_bits=8))
    assert noise(model, ours, data(7)) < 0.03
    with pytest.raises(InvalidInputError, match=r"0: there are 14 per_sample_weights for 21 ind"):
        ours(*data(7, each=2))


@pytest.mark.parametrize("kind", [Bagged, Weighted])
def test_tables_without_indices_need_no_plan_of_their_own(kind: type[Plain]) -> None:
    """Features that no sample of a batch has are common where batches are small."""
    data = weighted if kind is Weighted else ragged
    ours = guarded(kind(lower_triangle), [data() for _ in range(3)], embedding_bits=8)
    segment = program_of(ours).runtime.get_submodule("segment_0")
    dense, *lists = data(2)
    none = [[*x[:1], x[1][:0], *x[2:]] for x in lists]
    none[1][1] = torch.zeros_like(lists[1][1])  # the offsets
    for call in ((dense, *none), (dense, *lists), (dense, *none)):
        with torch.no_grad():
            assert torch.equal(ours(*call), graph_by_torch(ours, call))
        assert len(segment.plans) == 2  # for 24 samples, and for 2


@pytest.mark.parametrize("kind", [Bagged, Weighted])
def test_operands_that_lie_apart_are_copied(kind: type[Plain]) -> None:
    """And the next calls run natively, too."""
    data = weighted if kind is Weighted else ragged
    ours = guarded(kind(lower_triangle), [data() for _ in range(3)], embedding_bits=8)
    dense, *lists = data(7)
    with torch.no_grad():
        want = ours(dense, *lists)
        for at in range(len(lists)):
            given = [list(one) for one in lists]
            given[at] = [torch.stack([x, x], 1)[:, 0] for x in given[at]]
            assert torch.equal(ours(dense, *given), want)
    assert program_of(ours).float_nodes == ()


def test_another_number_of_tables_is_no_call_of_the_program() -> None:
    model = Reference(of_the_reference)
    ours = guarded(model, [bags_stacked() for _ in range(2)], strict=True)
    dense, _, indices = bags_stacked()
    with pytest.raises(InvalidInputError, match="indices has size 4 in dimension 0, not 5"):
        ours(dense, None, indices[:4])


class Wide(nn.Module):
    """Embeddings of ids beside dense features; bags of several beside those; no interaction."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.ModuleList([nn.Embedding(30, 8, padding_idx=0), nn.Embedding(20, 4)])
        self.bags = nn.ModuleList(
            [nn.EmbeddingBag(40, 8, mode="mean", padding_idx=3), nn.EmbeddingBag(9, 12, mode="max")]
        )
        self.top = nn.Sequential(nn.Linear(5 + 32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        words = [word(ids[:, i]) for i, word in enumerate(self.words)]
        found = [bag(bags[:, i]) for i, bag in enumerate(self.bags)]
        out: torch.Tensor = self.top(torch.cat([dense, *words, *found], 1))
        return out


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_lookups_of_all_kinds_are_one_step(bits: int | None) -> None:
    def data(samples: int = 20) -> Batch:
        ids = torch.stack([torch.randint(0, n, (samples,)) for n in (30, 20)], 1)
        bags = torch.stack([torch.randint(0, n, (samples, 3)) for n in (40, 9)], 1)
        return torch.randn(samples, 5), ids, bags

    model = Wide()
    ours = quantized(model, [data() for _ in range(4)], embedding_bits=bits)
    assert ops_of(ours).count("embedding_bags") == 1
    for samples in (1, 33):
        assert noise(model, ours, data(samples)) < (0.05 if bits == 4 else 0.005)
    dense, ids, bags = data(6)
    bags[5, 1, 2] = 9
    with pytest.raises(
        InvalidInputError, match=r"bags\.1: index 9 at position 17 is not in 0\.\.8"
    ):
        ours(dense, ids, bags)


def test_what_only_looks_like_it_is_left_alone() -> None:
    class MaxNorm(Plain):
        """Its tables are changed by looking at them."""

        def __init__(self) -> None:
            super().__init__(lower_triangle)
            bags = (nn.EmbeddingBag(ROWS, SIZE, mode="sum", max_norm=1.0) for _ in range(TABLES))
            self.tables = nn.ModuleList(bags)

    model = MaxNorm()
    ours = x86quant.quantize(
        model.eval(), [batch() for _ in range(2)], speed_check=False, progress=False
    )
    assert noise(model, ours, batch()) < 0.2
    if isinstance(ours, x86quant.CompiledModule):
        assert "interact_bags" not in ops_of(ours)
