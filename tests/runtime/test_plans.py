"""Plans for many shapes: sizes by rule, the cache of plans, choices that hold for many sizes."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.fx import GraphModule, Interpreter, Node

import x86quant
from tests.kernels.test_graph_kernels import halve_weights
from tests.lowering.test_lowering import MODELS, stock
from x86quant import extension
from x86quant.compiled import CompiledModule
from x86quant.errors import InvalidInputError, X86QuantWarning
from x86quant.routing.router import Routing
from x86quant.runtime import Plan, shapes
from x86quant.runtime import parts as parts_module
from x86quant.runtime import planner as planner_module
from x86quant.runtime.draft import Draft
from x86quant.runtime.plan import BatchStage
from x86quant.runtime.planner import draft_segment, plan_segment
from x86quant.runtime.segment import DEFAULT_BYTES, VARIABLE, PlanCache, default_bytes, plan_bytes
from x86quant.runtime.stages import plan_stages
from x86quant.spec import OpSpec
from x86quant.tables.table_reader import parse_table

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


class _Recorder(Interpreter):
    """The sizes and strides that the ops themselves give."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.seen: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.seen[n] = result
        return result


@pytest.mark.parametrize("name", MODELS)
def test_sizes_by_rule_are_those_of_the_ops(name: str) -> None:
    model, shape = MODELS[name][:2]
    torch.manual_seed(0)
    x = torch.randn(shape)
    gm = x86quant.compile(stock(model(), x), (x,)).graph_module
    recorder = _Recorder(gm)
    recorder.run(x)
    if any(node.op == "call_module" for node in gm.graph.nodes):
        return  # segments have none
    for node, found in shapes.infer_shapes(gm, (x,)).items():
        expected = recorder.seen[node]
        if isinstance(expected, torch.Tensor):
            assert found == expected.shape, node.format_node()
        elif node.op != "output" and isinstance(expected, int):
            assert found == expected, node.format_node()


# ------------------------------------------------------------------------ the cache of plans


def plan(steps: int, arena: int = 0) -> Plan:
    return Plan((None,) * steps, arena, steps, (), None)  # type: ignore[arg-type]


def kept(cache: PlanCache) -> list[int]:
    return [p.naive_bytes for p in cache.plans()]


def test_plans_are_kept_up_to_a_number_of_bytes() -> None:
    a_step = plan_bytes(plan(1))
    cache = PlanCache("segment", 100 * a_step)
    first = cache.get("a", lambda: plan(40), 1)
    cache.get("b", lambda: plan(41), 1)
    assert cache.get("a", lambda: plan(0), 1) is first, "it was there"
    cache.get("c", lambda: plan(42), 1)
    assert kept(cache) == [40, 42], "the one used longest ago goes first"
    cache.get("d", lambda: plan(1000), 1)
    assert kept(cache) == [1000], "the one that runs is kept whatever its size"
    cache.get("e", lambda: plan(43), 1)
    cache.get("f", lambda: plan(44), 1)
    assert kept(cache) == [43, 44]
    cache.resize(50 * a_step)
    assert kept(cache) == [44]


def test_plans_share_arenas_and_a_large_one_goes_when_it_runs_no_more() -> None:
    limit = 100 * plan_bytes(plan(1))
    cache = PlanCache("segment", limit)
    for steps in range(5):
        cache.get(steps, lambda steps=steps: plan(steps, arena=limit), 1)  # type: ignore[misc]
    assert kept(cache) == [0, 1, 2, 3, 4], "arenas that fit the bound count once"
    cache.get("large", lambda: plan(5, arena=limit + 1), 1)
    assert kept(cache) == [0, 1, 2, 3, 4, 5]
    cache.get(6, lambda: plan(6), 1)
    assert kept(cache) == [0, 1, 2, 3, 4, 6]


def test_each_thread_that_runs_parts_works_on_an_arena_of_its_own() -> None:
    whole, parted = plan(1, 1000), dataclasses.replace(plan(1, 1000), stages=(BatchStage(1, 1, 8),))
    assert whole.run_bytes(4) == 1000
    assert parted.run_bytes(4) == 4000
    assert parted.run_bytes(16) == 8000
    assert dataclasses.replace(parted, kept_bytes=7).run_bytes(4) == 4007


def test_one_warning_says_that_plans_are_made_again_and_again() -> None:
    cache = PlanCache("segment_0", plan_bytes(plan(100)))
    for i in range(50):  # many shapes, none of which comes back
        cache.get(i, lambda: plan(40), 1)

    def rotate() -> None:
        for i in range(20):
            cache.get(i % 4, lambda: plan(40), 1)

    with pytest.warns(X86QuantWarning, match=VARIABLE) as caught:
        rotate()
    assert len(caught) == 1


@pytest.mark.parametrize(("text", "expected"), [(None, DEFAULT_BYTES), ("0", 0), ("1.5", 3 << 19)])
def test_the_bound_comes_from_the_environment(
    text: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert default_bytes() == expected


@pytest.mark.parametrize("text", ["", "many", "-1", "inf", "nan"])
def test_a_bound_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidInputError, match=VARIABLE):
        default_bytes()


# ------------------------------------------------------------------------ plans of a module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.first(x)))
        return result


@pytest.fixture
def module() -> CompiledModule:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    return x86quant.compile(stock(Net(), x), (x,))


def test_forty_shapes_in_turn_are_planned_once_each(
    module: CompiledModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(*args: Any, **options: Any) -> Plan:
        made.append(args)
        return plan_segment(*args, **options)

    monkeypatch.setattr(parts_module, "plan_segment", counted)
    for _ in range(3):
        for side in range(10, 50):
            x = torch.randn(1, 3, side, 8)
            assert torch.equal(module(x), module.graph_module(x))
    assert len(made) == 40


def test_the_router_is_not_asked_for_every_shape(
    module: CompiledModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    choose = Routing.choose

    def counted(self: Routing, spec: OpSpec, *more: Any) -> Any:
        asked.append(spec)
        return choose(self, spec, *more)

    monkeypatch.setattr(Routing, "choose", counted)
    table = parse_table('schema = 1\nname = "t"\n[[rule]]\nop = "*"\nuse = "native"\n', "t.toml")
    with x86quant.use_rules(table):
        for side in range(10, 30):
            module(torch.randn(1, 3, side, 8))
    assert len(asked) == 2, "once for each convolution"
    steps = [step for step in module.segments[0].plans[-1].steps if step.choice is not None]
    assert [(step.choice.spec.spatial, step.choice.spec.rows) for step in steps if step.choice] == [
        ((29, 8), 29 * 8)
    ] * 2, "what is shown has the sizes of its plan"


def test_new_plans_follow_the_rules_in_force(module: CompiledModule) -> None:
    halve_weights(module.graph_module)  # so that no kernel saturates, on any CPU
    module = CompiledModule(module.graph_module, (), ())

    def kernels(side: int) -> set[str]:
        x = torch.randn(1, 3, side, 8)
        assert torch.equal(module(x), module.graph_module(x))
        return {step.kernel for step in module.segments[0].plans[-1].steps if step.choice}

    before = kernels(10)
    with x86quant.override("onednn", op="conv2d"):
        assert kernels(11) == {"onednn"}
    assert before != {"onednn"}
    assert kernels(12) == before


def test_programs_share_their_arenas(module: CompiledModule) -> None:
    gc.collect()
    before = extension.native().idle_arena_bytes()
    sides = range(200, 320, 8)
    for side in sides:
        x = torch.randn(1, 3, side, 256)
        assert torch.equal(module(x), module.graph_module(x))
    peaks = [plan.peak_bytes for plan in module.segments[0].plans[-len(sides) :]]
    assert sum(peaks) > 5 * max(peaks)
    assert max(peaks) <= extension.native().idle_arena_bytes() <= before + max(peaks)
    module.plan_cache_bytes = 0
    module(torch.randn(1, 3, 8, 8))
    (last,) = module.segments[0].plans
    assert extension.native().idle_arena_bytes() <= before + last.peak_bytes, "no plan needs more"


@pytest.mark.parametrize("limit", [-1, -(1 << 20)])
def test_a_negative_number_of_bytes_is_refused(module: CompiledModule, limit: int) -> None:
    with pytest.raises(InvalidInputError, match="plan_cache_bytes"):
        module.plan_cache_bytes = limit


class Sized(nn.Module):
    """Returns a number beside the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.net(x), x.shape[0]


def test_a_number_among_the_results_is_that_of_the_whole_batch() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(8, 3, 64, 64)
        module = x86quant.compile(stock(Sized(), x), (x,))
        result, batch = module(x)
        assert batch == 8
        assert torch.equal(result, module.graph_module(x)[0])
    finally:
        torch.set_num_threads(threads)


class Images(nn.Module):
    """Large enough that a batch runs image by image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.first(x))
        return self.last(y), y.mean((2, 3))


def test_one_plan_of_parts_serves_every_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_part_sizes", lambda batch, threads, most: [2 - batch % 2])
    made = []

    def counted(*args: Any) -> Plan | None:
        made.append(args[3][0].images)
        return plan_stages(*args)

    monkeypatch.setattr(parts_module, "plan_stages", counted)
    torch.manual_seed(0)  # of one number in 10,000 plain ops make another code
    x = torch.randn(2, 3, 40, 40)
    module = x86quant.compile(stock(Images(), x), (x,))
    for batch in (4, 3, 10, 6, 5, 4):
        x = torch.randn(batch, 3, 40, 40)
        for found, expected in zip(module(x), module.graph_module(x), strict=True):
            assert torch.equal(found, expected)
        assert module.segments[0].plans[-1].parts == batch // (2 - batch % 2)
    assert made == [2, 1], "a plan for each size of a part"
    with x86quant.override("onednn", op="conv2d"):
        x = torch.randn(8, 3, 40, 40)
        for found, expected in zip(module(x), module.graph_module(x), strict=True):
            assert torch.equal(found, expected)
    assert made == [2, 1, 2], "other rules, another plan"


def test_a_batch_of_images_not_met_before_is_drafted_once(
    module: CompiledModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether it is better run in parts needs what one image takes: its share of the whole batch.
    drafted = []

    def counted(*args: Any) -> Draft:
        drafted.append(args)
        return draft_segment(*args)

    # For several threads images like others are first drafted as a part of the same size.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    for owner in (parts_module, planner_module):
        monkeypatch.setattr(owner, "draft_segment", counted)
    for side in (12, 14):
        x = torch.randn(4, 3, side, 8)
        assert torch.equal(module(x), module.graph_module(x))
    assert [args[1][0].shape for args in drafted] == [(4, 3, 12, 8), (4, 3, 14, 8)]


def test_a_program_of_no_parts_has_no_other_number_of_them(module: CompiledModule) -> None:
    module(torch.randn(1, 3, 8, 8))
    with pytest.raises(ValueError, match="parts"):
        module.segments[0].plans[-1].program.of_parts(2)


class JoinsFeatures(nn.Module):
    """Joins what a linear makes of rows with the rows, in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.linear(x)], -1)


def test_features_of_rows_are_joined() -> None:
    """The result lies channels last, which in three dimensions are not the features."""
    x = torch.randn(2, 6, 8)
    prepared = prepare_fx(JoinsFeatures().eval(), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    converted = convert_fx(prepared)
    found = x86quant.compile(converted, (x,))(x)
    assert float((found - converted(x)).abs().max()) < 0.05
