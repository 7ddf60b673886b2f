"""Plans for many shapes: sizes by rule, and the cache of plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node

import x86quant
from tests.test_lowering import MODELS, stock
from x86quant.errors import InvalidInputError, X86QuantWarning
from x86quant.runtime import Plan, shapes
from x86quant.runtime.plan_cache import DEFAULT_BYTES, VARIABLE, PlanCache, default_bytes

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


def plan(nbytes: int) -> Plan:
    return Plan((), nbytes, nbytes, (), None)


def test_plans_are_kept_up_to_a_number_of_bytes() -> None:
    cache = PlanCache("segment", 100)
    made = [cache.get(i, lambda: plan(40), 1) for i in range(3)]
    assert cache.plans() == (made[1], made[2]), "the one used longest ago goes first"
    assert cache.get(1, lambda: plan(40), 1) is made[1]
    cache.get(3, lambda: plan(40), 1)
    assert made[1] in cache.plans()
    assert made[2] not in cache.plans()
    large = cache.get(4, lambda: plan(1000), 1)
    assert cache.plans() == (large,), "the one that runs is kept whatever its size"
    cache.get(5, lambda: plan(40), 1)
    assert large not in cache.plans()


def test_one_warning_says_that_plans_are_made_again_and_again() -> None:
    cache = PlanCache("segment_0", 100)
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
