"""Batches in stages: of how many images parts are, and that what runs so gives the same."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.lowering.test_lowering import stock
from x86quant import extension
from x86quant.compiled import CompiledModule
from x86quant.runtime import Plan, layout
from x86quant.runtime import parts as parts_module
from x86quant.runtime import stages as stages_module
from x86quant.runtime.draft import Draft
from x86quant.runtime.packs import Packs
from x86quant.runtime.plan import BatchStage
from x86quant.runtime.planner import draft_segment
from x86quant.runtime.stages import (
    Costs,
    StepBytes,
    best_stages,
    beyond,
    one_stage,
    plan_stages,
    streamed,
)

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")

CACHE = 48 << 10  # small networks are to it what large ones are to a real one


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    here = dataclasses.replace(parts_module.cpu(), l2=CACHE)
    monkeypatch.setattr(parts_module, "cpu", lambda: here)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# ------------------------------------------------------------------------ how large parts are


def test_images_go_one_by_one_until_weights_are_what_is_large() -> None:
    early, late = StepBytes(100, 900, 400), StepBytes(5000, 50, 20)
    found = best_stages(Costs([early, early, late, late], 1000), [1, 2, 4, 8], 8)
    assert found == [BatchStage(2, 1, 8), BatchStage(4, 8, 1)]
    assert streamed([early, early, late, late], found) == 2 * 100 / 1 + 2 * 5000 / 8


def test_what_would_be_kept_may_cost_more_than_it_saves() -> None:
    early, late = StepBytes(100, 900, 400), StepBytes(2000, 100, 950)
    costs = Costs([early, late], 1000)
    assert best_stages(costs, [1, 8], 8) == one_stage(costs, [1, 8], 8)


def test_parts_may_become_smaller_again() -> None:
    wide, narrow = StepBytes(100, 900, 60), StepBytes(5000, 50, 50)
    found = best_stages(Costs([wide, narrow, wide], 1000), [1, 8], 8)
    assert [stage.images for stage in found] == [1, 8, 1]
    assert [stage.end for stage in found] == [1, 2, 3]


def test_of_parts_that_cost_the_same_the_largest_are_taken() -> None:
    steps = [StepBytes(0, 10, 5)] * 3
    assert best_stages(Costs(steps, 1000), [1, 2, 4], 4) == [BatchStage(3, 4, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_no_way_through_the_steps_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    steps = [
        StepBytes(draw.randrange(3000), draw.randrange(1500), draw.randrange(300)) for _ in range(5)
    ]
    steps[0] = dataclasses.replace(steps[0], alive=0)
    sizes = [1, 2, 6]

    def cost(way: Sequence[int]) -> float:
        moved = sum(beyond(step, size, 1000) for step, size in zip(steps, way, strict=True))
        pairs = zip(steps[1:], itertools.pairwise(way), strict=True)
        return moved + sum(2 * step.alive for step, (one, other) in pairs if one != other)

    found = best_stages(Costs(steps, 1000), sizes, 6)
    starts = [0, *(stage.end for stage in found)]
    way = [s.images for start, s in zip(starts, found, strict=False) for _ in range(start, s.end)]
    assert cost(way) == pytest.approx(min(map(cost, itertools.product(sizes, repeat=5))))


# ------------------------------------------------------------------------ networks


class Narrowing(nn.Module):
    """Large images first, many weights last; a result of the early part, and sums and
    concatenations of what lies far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.early = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.down = nn.Conv2d(32, 64, 3, stride=4, padding=1)
        self.around = nn.Conv2d(64, 64, 1)
        self.late = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(128, 8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.early(torch.relu(self.stem(x))))
        seen = x.mean((2, 3))
        x = torch.relu(self.down(x))
        kept = self.around(x)
        for late in self.late:
            x = torch.relu(late(x) + kept)
        return self.last(torch.cat([x, kept], 1)), seen


class Widening(nn.Module):
    """Many weights in the middle; what the large images at the end read came before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.beside = nn.Conv2d(16, 2, 1)
        self.down = nn.Conv2d(16, 96, 4, stride=8)
        self.middle = nn.Sequential(
            nn.Conv2d(96, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 4, 1)
        )
        self.up = nn.Upsample(scale_factor=8)  # what comes behind is as large as what came before
        self.wide = nn.Sequential(nn.Conv2d(6, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        beside = self.beside(x)
        y = self.up(self.middle(torch.relu(self.down(x))))
        result: torch.Tensor = self.wide(torch.cat([beside, y], 1))
        return result


NETWORKS = {"narrowing": (Narrowing, 32), "widening": (Widening, 64)}


def compiled(name: str, batch: int) -> tuple[CompiledModule, torch.Tensor]:
    build, side = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.randn(batch, 3, side, side)
    return x86quant.compile(stock(build(), x), (x,)), x


def plan_of(module: CompiledModule) -> Plan:
    return module.segments[0].plans[-1]


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def same(module: CompiledModule, x: torch.Tensor) -> bool:
    """Whether a batch gives what its images give one by one."""
    found = tensors(module(x))
    plan = plan_of(module)
    each = [tensors(module(image)) for image in x.split(1)]
    module(x)
    assert plan_of(module) is plan
    expected = map(torch.cat, zip(*each, strict=True))
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_batch_in_stages_gives_the_same(name: str, threads: int) -> None:
    module, x = compiled(name, 8)
    assert same(module, x)
    plan = plan_of(module)
    images = [stage.images for stage in plan.stages]
    assert len(images) > 1, "the sizes of this network call for stages"
    assert images[0] < images[1] <= 8 // threads
    assert all(stage.images * stage.parts == 8 for stage in plan.stages)
    assert plan.stages[-1].end == len(plan.steps)
    assert plan.kept_bytes > 0
    for stage in plan.stages:
        assert f"in {stage.parts} parts of {stage.images}:" in str(plan)
    wide = torch.randn(8, 3, x.shape[2], x.shape[3] + 8)[..., 8:]  # rows that lie apart
    assert same(module, wide)
    assert same(module, x.contiguous(memory_format=torch.channels_last))
    assert same(module, x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2))  # images innermost


@pytest.mark.parametrize("name", NETWORKS)
def test_one_plan_in_stages_serves_every_multiple(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(*given: Any) -> Plan | None:
        made.append(given[1][0].shape[0])
        return plan_stages(*given)

    monkeypatch.setattr(parts_module, "plan_stages", counted)
    module, x = compiled(name, 16)
    first = plan_of(module).stages
    for batch in (32, 16, 48):
        assert same(module, torch.randn(batch, *x.shape[1:]))
        found = plan_of(module).stages
        assert [(s.end, s.images) for s in found] == [(s.end, s.images) for s in first]
        assert [s.parts for s in found] == [s.parts * batch // 16 for s in first]
    assert made == [16]
    program = plan_of(module).program
    with pytest.raises(ValueError, match="does not divide"):
        program.of_parts(1)


def test_images_not_met_before_go_as_if_they_were_the_first(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = []

    def counted(*given: Any, **options: Any) -> Draft:
        drafted.append(given[1][0].shape[0])
        return draft_segment(*given, **options)

    module, x = compiled("narrowing", 16)
    module(x)
    for owner in (parts_module, stages_module):
        monkeypatch.setattr(owner, "draft_segment", counted)
    other = torch.randn(16, *x.shape[1:-1], x.shape[-1] + 4)
    found = tensors(module(other))
    images = {stage.images for stage in plan_of(module).stages}
    assert len(images) > 1
    assert sorted(drafted) == sorted(images), "not the whole batch"
    graph = module.segments[0].graph_module
    alone = parts_module.BatchParts(graph, Packs(graph)).plan([other], torch.get_num_threads())
    assert sorted(drafted) == sorted([*images, *images, 16])
    assert str(plan_of(module)) == str(alone)
    expected = alone.program.run([other])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Pointwise(nn.Module):
    """Begins with steps that leave values as their input lies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(x)
        return torch.relu(self.last(torch.relu(self.first(torch.tanh(x))))) + x


LIES = {
    "one behind the other": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "images innermost": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
}


@pytest.mark.parametrize("lies", LIES)
def test_wherever_a_stage_ends_the_result_is_the_same(lies: str) -> None:
    torch.manual_seed(0)
    x = LIES[lies](torch.randn(4, 3, 10, 12))
    module = x86quant.compile(stock(Pointwise(), x), (x,))
    expected = torch.cat([module(image) for image in x.split(1)])
    graph = module.segments[0].graph_module
    steps = len(plan_of(module).steps)
    packs = Packs(graph)
    known: dict[int, Draft] = {}
    plans = []
    for end in range(1, steps):
        for one, other in itertools.permutations((1, 2, 4), 2):
            stages = [BatchStage(end, one, 4 // one), BatchStage(steps, other, 4 // other)]
            alone = plan_stages(graph, [x], Packs(graph), stages)
            shared = plan_stages(graph, [x], packs, stages, known)
            assert alone is not None
            assert shared is not None
            assert str(shared) == str(alone)
            for plan in (alone, shared):
                (found,) = plan.program.run([x])
                assert torch.equal(found, expected), (end, one, other)
            plans.append(shared)
    assert sorted(known) == [1, 2, 4], "a draft for each number of images"
    for plan in plans:  # those that others were made after
        (found,) = plan.program.run([x])
        assert torch.equal(found, expected)


def test_batches_cut_elsewhere_take_the_drafts_of_plans_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafted = []

    def counted(*given: Any, **options: Any) -> Draft:
        drafted.append(given[1][0].shape[0])
        return draft_segment(*given, **options)

    ways = {4: [(1, 1), (9, 2)], 8: [(2, 1), (9, 2)], 16: [(2, 2), (9, 1)], 2: [(1, 2), (9, 1)]}

    def cut(self: Any, inputs: Any, image: Any, threads: int, batch: int, shapes: Any) -> Any:
        return [[BatchStage(end, images, batch // images) for end, images in ways[batch]]]

    monkeypatch.setattr(stages_module, "draft_segment", counted)
    monkeypatch.setattr(parts_module.BatchParts, "_ways", cut)
    torch.manual_seed(0)
    module = x86quant.compile(stock(Pointwise(), x := torch.randn(1, 3, 10, 12)), (x,))
    for batch in (4, 8, 16):
        assert same(module, torch.randn(batch, 3, 10, 12))
    assert sorted(drafted) == [1, 2]
    module.plan_cache_bytes = 0
    module(torch.randn(1, 3, 10, 12))
    gc.collect()
    module(torch.randn(8, 3, 10, 12))
    assert sorted(drafted) == [1, 1, 2, 2], "they are gone with the plans"
    with x86quant.override("onednn", op="conv2d"):
        module(torch.randn(2, 3, 10, 12))
    assert sorted(drafted) == [1, 1, 1, 2, 2, 2], "other rules, other drafts"


@pytest.mark.parametrize("dim", [0, 1], ids=["images apart", "another order inside"])
def test_what_lies_otherwise_in_parts_of_another_size_is_not_kept(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 10, 12)
    module = x86quant.compile(stock(Pointwise(), x), (x,))

    def changed(*given: Any, **options: Any) -> Draft:
        draft = draft_segment(*given, **options)
        value = draft.steps[1].output
        if value.shape[0] == 2:  # the same bytes in another order
            order = [1, 2, 3, 0] if dim == 0 else [0, 1, 2, 3]
            value.meta = layout.like(value.shape, order)
        return draft

    monkeypatch.setattr(stages_module, "draft_segment", changed)
    graph = module.segments[0].graph_module
    steps = len(plan_of(module).steps)
    stages = [BatchStage(2, 1, 4), BatchStage(steps, 2, 2)]
    assert plan_stages(graph, [x], Packs(graph), stages) is None
    whole = [BatchStage(steps, 4, 1)]
    assert plan_stages(graph, [x], Packs(graph), whole) is not None


def test_where_stages_do_not_fit_together_parts_are_of_one_size(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refused(*given: Any) -> Plan | None:
        tried.append(len(given[3]))
        return plan_stages(*given) if len(given[3]) == 1 else None

    monkeypatch.setattr(parts_module, "plan_stages", refused)
    module, x = compiled("narrowing", 8)
    assert same(module, x)
    assert [stage.images * stage.parts for stage in plan_of(module).stages] == [8]
    assert tried == [2, 1]
    assert same(module, torch.randn(16, *x.shape[1:]))
    assert tried == [2, 1], "what did not fit is not tried again"


def test_explain_and_profile_say_in_which_parts_each_step_runs(threads: int) -> None:
    module, x = compiled("narrowing", 8)
    module(x)
    plan = plan_of(module)
    profile = x86quant.profile(module, (x,), runs=1)
    assert [s.step.parts for s in profile] == plan.parts_of_steps()
    assert profile.peak_bytes == plan.run_bytes(threads)
    assert len({*plan.parts_of_steps()}) == len(plan.stages)
    for step, parts in zip(profile, plan.parts_of_steps(), strict=True):
        assert step.step.output[0] == 8
        assert parts == 1 or step.step.shape.endswith(f"{parts} parts")
    explained = x86quant.explain(module, inputs=(x,))
    shapes = {layer.layer: layer.shape for layer in explained}
    assert shapes["stem"].endswith(f"{plan.stages[0].parts} parts")


def test_memory_of_what_is_kept_is_checked() -> None:
    module, x = compiled("narrowing", 8)
    module(x)
    program = extension.native().Program(0, 0)
    with pytest.raises(ValueError, match="impossible"):
        program.keep([-1])
    with pytest.raises(ValueError, match="impossible"):
        program.keep([1 << 62, 1 << 62])
    program.keep([64])
    with pytest.raises(ValueError, match="before its steps"):
        program.keep([64])
    with pytest.raises(ValueError, match="malformed"):
        program.repeat(2, [])
