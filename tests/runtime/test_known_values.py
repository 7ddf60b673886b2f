"""Values that depend on sizes alone: computed once for each set of sizes, never kept wrongly."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant import CompiledModule, extension
from x86quant.runtime import known_values
from x86quant.runtime.known_values import KnownValues, known_nodes

aten = torch.ops.aten
Build = Callable[[Graph, Node, Node], Any]


def graph_of(build: Build) -> GraphModule:
    """A graph of ``x`` and of the table ``weight`` [64, 4]."""
    root = nn.Module()
    root.register_buffer("weight", torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    graph = Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    graph.output(build(graph, x, weight))
    return GraphModule(root, graph)


def positions(graph: Graph, x: Node, weight: Node) -> Node:
    """x [..., n, 4] and the embeddings of the numbers of its rows."""
    size = graph.call_function(aten.sym_size.int, (x, 0))
    numbers = graph.call_function(aten.arange.default, (size,))
    rows = graph.call_function(aten.embedding.default, (weight, numbers))
    return graph.call_function(aten.add.Tensor, (x, rows))


def known_names(build: Build) -> list[str]:
    return [str(node.target) for node in known_nodes(graph_of(build).graph)]


def part_of(module: CompiledModule) -> KnownValues:
    (found,) = (m for m in module.runtime.children() if isinstance(m, KnownValues))
    return found


def test_they_are_computed_once_for_each_size() -> None:
    graph = graph_of(positions)
    module = CompiledModule(graph)
    part = part_of(module)
    calls = []
    part.graph_module.register_forward_pre_hook(lambda _, sizes: calls.append(sizes))
    for rows in (3, 5, 3, 5, 3):
        x = torch.randn(rows, 4)
        assert torch.equal(module(x), graph(x))
    assert calls == [(3,), (5,)]


def test_a_weight_that_changes_is_read_again() -> None:
    graph = graph_of(positions)
    module = CompiledModule(graph)
    x = torch.randn(3, 4)
    before = module(x)
    module.graph_module.weight.add_(1.0)
    torch.testing.assert_close(module(x), before + 1)
    assert torch.equal(module(x), graph(x))


def returned(graph: Graph, x: Node, weight: Node) -> Any:
    size = graph.call_function(aten.sym_size.int, (x, 0))
    numbers = graph.call_function(aten.arange.default, (size,))
    return (x, numbers)


def viewed_and_returned(graph: Graph, x: Node, weight: Node) -> Any:
    _, numbers = returned(graph, x, weight)
    values = graph.call_function(aten.add.Tensor, (numbers, 1))
    return (
        graph.call_function(aten.mul.Tensor, (x, values)),
        graph.call_method("view", (numbers, -1)),
    )


def of_data(graph: Graph, x: Node, weight: Node) -> Any:
    size = graph.call_function(aten.sym_size.int, (x, 0))
    count = graph.call_function(aten.sum.default, (x,))
    drawn = graph.call_function(aten.rand.default, ([size],))
    written = graph.call_function(aten.add_.Tensor, (weight, 1))
    return tuple(graph.call_function(aten.mul.Tensor, (x, y)) for y in (count, drawn, written))


def of_a_computed_size(graph: Graph, x: Node, weight: Node) -> Any:
    found = graph.call_function(aten.nonzero.default, (x,))
    size = graph.call_function(aten.sym_size.int, (found, 0))
    numbers = graph.call_function(aten.arange.default, (size,))
    return graph.call_function(aten.mul.Tensor, (found, numbers))


@pytest.mark.parametrize("build", [returned, viewed_and_returned, of_data, of_a_computed_size])
def test_what_a_caller_may_hold_or_data_decide_is_not_kept(build: Build) -> None:
    assert known_names(build) == []


def test_numbers_and_their_embeddings_are_known() -> None:
    assert known_names(positions) == ["aten.arange.default", "aten.embedding.default"]


def test_they_are_kept_as_native_steps_read_masks() -> None:
    """Biases that are looked up head by head, as T5's are."""

    def biases(graph: Graph, x: Node, weight: Node) -> Node:
        size = graph.call_function(aten.sym_size.int, (x, 1))
        rows = graph.call_function(aten.slice.Tensor, (weight, 0, 0, 4))
        turned = graph.call_function(aten.t.default, (rows,))
        cut = graph.call_function(aten.slice.Tensor, (turned, 1, 0, size))
        return graph.call_function(aten.add.Tensor, (x, cut))

    module, x = CompiledModule(graph_of(biases)), torch.randn(4, 4)
    assert torch.equal(module(x), graph_of(biases)(x))
    (kept,) = part_of(module)._kept.values()
    assert [value.stride() for value in kept] == [(4, 1)]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "MOST_SIZES", 2)
    module = CompiledModule(graph_of(positions))
    for rows in range(1, 9):
        module(torch.randn(rows, 4))
    part = part_of(module)
    assert [*part._kept] == [(7,), (8,)]
    monkeypatch.setattr(known_values, "MOST_BYTES", 100)
    module(torch.randn(9, 4))  # of 144 bytes: too many to keep
    assert not part._kept
    assert part._bytes == 0


def test_any_number_of_threads_may_ask() -> None:
    graph = graph_of(positions)
    module = CompiledModule(graph)
    wrong = []

    def run(number: int) -> None:
        for rows in range(1, 40):
            x = torch.full((1 + (rows * number) % 7, 4), float(rows))
            if not torch.equal(module(x), graph(x)):
                wrong.append((number, rows))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_changes_of_dictionaries_are_noticed() -> None:
    unchanged_since = extension.fast().unchanged_since
    if extension.fast() is extension.native():
        assert not unchanged_since(({},), bytearray(8)), "nobody counts here"
        return
    layer = nn.Linear(2, 2)
    dictionaries = (vars(layer), layer._forward_hooks)
    counts = bytearray(16)
    assert not unchanged_since(dictionaries, counts)  # it has not been asked before
    same = unchanged_since(dictionaries, counts)
    assert unchanged_since(dictionaries, counts) == same  # never where CPython does not count
    for change in (
        lambda: setattr(layer, "training", False),
        lambda: setattr(layer, "new", 1),
        lambda: delattr(layer, "new"),
        lambda: layer.register_forward_hook(print),
        layer._forward_hooks.clear,
    ):
        change()
        assert not unchanged_since(dictionaries, counts), change
        assert unchanged_since(dictionaries, counts) == same
    with pytest.raises(ValueError, match="8 bytes for each"):
        unchanged_since(dictionaries, bytearray(8))
    with pytest.raises(TypeError, match="a tuple of dictionaries"):
        unchanged_since((1,), bytearray(8))


def test_sizes_are_not_mixed_up() -> None:
    """Two inputs whose sizes are asked for in turn."""
    root, graph = nn.Module(), Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    sizes = [graph.call_function(aten.sym_size.int, (each, 0)) for each in (x, y)]
    product = graph.call_function(operator.mul, tuple(sizes))
    numbers = graph.call_function(aten.arange.default, (product,))
    table = graph.call_function(aten.add.Tensor, (numbers, sizes[1]))
    both = graph.call_function(aten.outer.default, (x, y))
    whole = graph.call_function(aten.reshape.default, (both, [product]))
    graph.output(graph.call_function(aten.add.Tensor, (whole, table)))
    module = CompiledModule(GraphModule(root, graph))
    for a, b in ((2, 3), (3, 2), (1, 6), (2, 3)):
        expected = torch.arange(a * b) + b + 1.0
        assert torch.equal(module(torch.ones(a), torch.ones(b)), expected)
