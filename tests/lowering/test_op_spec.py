"""What must hold of a graph of x86quant ops; tests hold every graph against it after each pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

import x86quant
from tests.models import TwoLinears, rows
from x86quant.errors import UnsupportedError
from x86quant.lowering import passes
from x86quant.lowering.graph_tools import is_op
from x86quant.lowering.op_spec import check_graph


@pytest.fixture(scope="module")
def lowered() -> GraphModule:
    batches = [rows(), rows(seed=1)]
    model = x86quant.quantize(TwoLinears().eval(), batches, progress=False, speed_check=False)
    assert isinstance(model, x86quant.CompiledModule)
    return model.graph_module


def first_linear(gm: GraphModule) -> Node:
    return next(node for node in gm.graph.nodes if is_op(node, "linear"))


def give(**arguments: Any) -> Callable[[GraphModule], None]:
    def change(gm: GraphModule) -> None:
        node = first_linear(gm)
        node.kwargs = {**node.kwargs, **arguments}

    return change


def weight_of_other_rank(gm: GraphModule) -> None:
    path = str(first_linear(gm).kwargs["weight"].target)  # type: ignore[union-attr]
    setattr(gm, path, torch.zeros(4, dtype=torch.int8)) if "." not in path else gm.get_submodule(
        path.rpartition(".")[0]
    ).__setattr__(path.rpartition(".")[2], torch.zeros(4, dtype=torch.int8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (give(out_scale=0.0), "a scale is positive"),
        (give(x_zp=300), "a zero point is in"),
        (give(lo=9, hi=3), "not a range"),
        (give(weight=None), "weight must be Tensor"),
        (weight_of_other_rank, "needs two dimensions"),
    ],
)
def test_a_wrong_call_is_named(
    change: Callable[[GraphModule], None], message: str, lowered: GraphModule
) -> None:
    check_graph(lowered)
    changed = copy.deepcopy(lowered)
    change(changed)
    with pytest.raises(UnsupportedError, match=f"linear.*{message}"):
        check_graph(changed)


def test_what_comes_later_is_not_used(lowered: GraphModule) -> None:
    changed = copy.deepcopy(lowered)
    first = next(node for node in changed.graph.nodes if is_op(node))
    *_, last, _ = changed.graph.nodes
    first.update_kwarg("x", last)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        check_graph(changed)


def test_every_pass_is_checked_in_tests(lowered: GraphModule) -> None:
    changed = copy.deepcopy(lowered)
    give(out_scale=0.0)(changed)
    with pytest.raises(UnsupportedError, match="a scale is positive"):
        passes.run_passes(changed)
