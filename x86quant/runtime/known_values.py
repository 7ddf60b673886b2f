"""Values of a graph that depend on weights and sizes alone: computed once for each set of sizes.

Numbers of positions, their embeddings and masks that hide the future are such. Transformers compute
them anew at every call, which for a short sentence takes as long as a layer.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.graph_tools import is_op
from x86quant.lowering.views import computes_a_size, moves_codes

#: What is kept, for how many sets of sizes and in bytes of all values together.
MOST_SIZES, MOST_BYTES = 32, 16 << 20

_SIZE = torch.ops.aten.sym_size.int


def known_nodes(graph: Graph, torch_nodes: Collection[str] = ()) -> list[Node]:
    """The nodes of ``graph`` whose tensors depend on constants and sizes alone.

    None where the caller could get hold of one, since what a caller writes to must not be kept.
    """
    known: dict[Node, None] = {}
    for node in graph.nodes:
        if _is_pure(node) and all(_is_given(x, known) for x in node.all_input_nodes):
            known[node] = None
    users = {user for node in known for user in node.users if user not in known}
    escapes = any(user.op == "output" or _may_alias(user) for user in users)
    return [] if escapes else [node for node in known if node.name not in torch_nodes]


def _is_pure(node: Node) -> bool:
    """Whether ``node`` calls an op of torch that gives the same for the same, and a new tensor."""
    if node.op != "call_function" or is_op(node) or is_size(node):
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    returns = target._schema.returns
    return (
        not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and len(returns) == 1
        and str(returns[0].type) == "Tensor"
    )


def _is_given(node: Node, known: Collection[Node]) -> bool:
    return node in known or node.op == "get_attr" or _is_size_of_inputs(node)


def is_size(node: Node) -> bool:
    """Whether ``node`` is a size, or a number made of sizes."""
    return node.target is _SIZE or computes_a_size(node)


def _is_size_of_inputs(node: Node) -> bool:
    return is_size(node) and all(
        source.op == "placeholder" or _is_size_of_inputs(source) for source in node.all_input_nodes
    )


def sizes_of(known: Iterable[Node]) -> list[Node]:
    """The sizes that ``known`` nodes read, each behind those that it is made of."""
    found: dict[Node, None] = {}

    def add(size: Node) -> None:
        for source in size.all_input_nodes:
            if source.op != "placeholder":
                add(source)
        found[size] = None

    for node in known:
        for source in node.all_input_nodes:
            if is_size(source):
                add(source)
    return list(found)


def _may_alias(node: Node) -> bool:
    """Whether the result of ``node`` may be memory of what it reads."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return True
    if is_op(node):
        return moves_codes(node)
    return any(result.alias_info is not None for result in node.target._schema.returns)


class KnownValues(nn.Module):
    """Runs ``graph_module`` once for each set of sizes, its inputs, and keeps what it gave.

    Thread safe. What is returned belongs to all calls: nobody may write to it.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__()
        self.graph_module = graph_module
        self._kept: collections.OrderedDict[tuple[Any, ...], tuple[torch.Tensor, ...]] = (
            collections.OrderedDict()
        )
        self._bytes = 0
        self._lock = threading.Lock()

    def forward(self, *sizes: Any) -> tuple[torch.Tensor, ...]:
        """The values for these sizes."""
        found = self._kept.get(sizes)
        if found is None:
            found = tuple(map(_with_rows, self.graph_module(*sizes)))
            self._keep(sizes, found)
        return found

    def _keep(self, sizes: tuple[Any, ...], values: tuple[torch.Tensor, ...]) -> None:
        with self._lock:
            if sizes in self._kept:
                return
            self._kept[sizes] = values
            self._bytes += _bytes(values)
            while self._kept and (self._bytes > MOST_BYTES or len(self._kept) > MOST_SIZES):
                self._bytes -= _bytes(self._kept.popitem(last=False)[1])


def _with_rows(value: torch.Tensor) -> torch.Tensor:
    """``value`` as native steps read masks, laid out once rather than on each run."""
    return value if value.dim() == 0 or value.stride(-1) == 1 else value.contiguous()


def _bytes(values: tuple[torch.Tensor, ...]) -> int:
    return sum(value.untyped_storage().nbytes() for value in values)
