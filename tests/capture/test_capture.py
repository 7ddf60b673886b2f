"""Modules as graphs by torch.export, and the proof that such a graph is the module."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import x86quant
from x86quant.calling.call import Call
from x86quant.calling.differences import SAME_ARITHMETIC
from x86quant.capture.exported import every_size, exported_once, ops_from_export
from x86quant.capture.observed import observe
from x86quant.capture.opaque_parts import exported_whole
from x86quant.capture.proof import _other_rows, prove
from x86quant.capture.traced_graph import Traced
from x86quant.compiled import CompiledModule
from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import CallForm
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.lowering.graph_tools import is_op

X = torch.arange(24.0).reshape(3, 8)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * self.factor,)


def traced(module: nn.Module) -> Traced:
    form, _ = CallForm.of(module, (X,), {})
    guard = Guard((GuardedInput("x", torch.float32, 2),))
    results = ops_from_export(module, form, [X]).results
    return Traced(symbolic_trace(module), form, results, guard, "torch.fx")


def test_a_proof_is_as_strict_as_is_asked() -> None:
    module, graph = Times(1.0), traced(Times(1.00005))
    seen = observe(module, [""], [Call((X,))])[""]
    assert prove(module, graph, seen).guard == graph.guard
    with pytest.raises(UnsupportedError, match="differs from the module"):
        prove(module, graph, seen, SAME_ARITHMETIC)
    with pytest.raises(UnsupportedError, match="differs from the module"):
        prove(module, traced(Times(1.0005)), seen)


class Around(nn.Module):
    """A compiled part, and what torch.export sees around it."""

    def __init__(self) -> None:
        super().__init__()
        data = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        self.part = x86quant.quantize(inner, data, progress=False, speed_check=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x + 1) * 2  # type: ignore[no-any-return]


def test_the_nodes_of_a_compiled_part_stand_in_the_graph_of_the_whole() -> None:
    module = Around().eval()
    assert isinstance(module.part, CompiledModule)
    form, leaves = CallForm.of(module, (X,), {})
    graph = exported_whole(module, form, leaves, every_size).graph_module
    linears = [node for node in graph.graph.nodes if is_op(node, "linear", "linear_real")]
    assert [str(node.meta["layer"]) for node in linears] == ["part.0", "part.2"]
    (found,) = CompiledModule(graph)(X)
    assert torch.equal(found, module(X))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(x[0])
        return x + 1


def test_what_a_call_changes_in_a_module_is_no_graph() -> None:
    module = Remembers()
    form, leaves = CallForm.of(module, (X,), {})
    with pytest.raises(UnsupportedError, match=r"a call changes inner\.last"):
        exported_once(module, form, leaves, every_size)


def test_calls_of_other_sizes_that_a_graph_does_not_take_are_made_of_those_it_takes() -> None:
    module, graph = Times(1.0), traced(Times(1.0))
    guard = Guard((GuardedInput("x", torch.float32, 2, ((1, 8),)),))
    graph = dataclasses.replace(graph, guard=guard)

    def rows(*calls: torch.Tensor) -> list[tuple[int, ...]]:
        seen = observe(module, [""], [Call((x,)) for x in calls])[""]
        return [tuple(x.call.leaves[0].shape) for x in _other_rows(module, graph, seen)]

    assert rows(X, torch.ones(2, 5)) == [(1, 8), (2, 8)]
    assert rows(X[:2], torch.ones(3, 5)) == [(1, 8)]
    assert rows(X[:1], torch.ones(3, 5)) == [(2, 8)]
    assert rows(X, torch.ones(3, 5)) == []  # there are no others
    assert rows(X, X[:2], torch.ones(1, 5)) == []  # the graph has held for two of them
    assert rows(torch.ones(2, 5)) == []


def test_a_graph_that_leaves_calls_out_is_partial() -> None:
    """Or one whose caller catches errors and might call otherwise."""
    module, graph = Times(1.0), traced(Times(1.0))
    guard = Guard((GuardedInput("x", torch.float32, 2, ((1, 8),)),))
    graph = dataclasses.replace(graph, guard=guard)

    def partial(*calls: torch.Tensor, near_handlers: bool = False) -> bool:
        seen = observe(module, [""], [Call((x,)) for x in calls])[""]
        seen = [dataclasses.replace(one, near_handlers=near_handlers) for one in seen]
        return prove(module, graph, seen).is_partial

    assert not partial(X, X[:2])
    assert partial(X, torch.ones(2, 5))
    assert partial(X, near_handlers=True)
    with pytest.raises(UnsupportedError, match="no calibration batch meets"):
        partial(torch.ones(2, 5))


def test_a_module_that_draws_numbers_is_no_graph() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x + torch.rand(()),)

    seen = observe(Noise(), [""], [Call((X,))])[""]
    with pytest.raises(UnsupportedError, match="two calls on the same inputs differ"):
        prove(Noise(), traced(Times(1.0)), seen)
    # What one run gave again need not be run once more; what it did not give may be a cache.
    steady = observe(Times(1.0), [""], [Call((X,))])[""]
    for again in (steady[0].result, (X + 1,), None):
        repeated = [dataclasses.replace(steady[0], again=again)]
        assert prove(Times(1.0), traced(Times(1.0)), repeated).guard == traced(Times(1.0)).guard
