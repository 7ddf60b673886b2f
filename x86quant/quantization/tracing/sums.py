"""Sums over a few branches, as sums of tensors: ``stack([a, b], 1).sum(1)`` is ``a + b``.

Networks that weigh branches (ResNeSt, selective kernels) stack them, or see groups of channels as a
dimension, multiply by attention, and add up over it. Branch by branch these are products and sums
of pictures, which have int8 forms and need no tensor of all branches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import given_by_name
from x86quant.quantization.tracing.seen_values import seen_values

aten = torch.ops.aten
#: More branches are not worth a step each.
_MOST = 4
_MULTIPLIES = (torch.mul, torch.multiply, operator.mul, aten.mul.Tensor)
_VIEWS = (torch.reshape, aten.reshape.default, aten.view.default)


def spell_sums(gm: GraphModule, inputs: Callable[[], Sequence[torch.Tensor]]) -> None:
    """Let sums of ``gm`` over branches be sums of these; not yet recompiled.

    Args:
        gm: a traced graph.
        inputs: what it takes, run to see shapes if there are such sums.
    """
    found = [(node, dim) for node in gm.graph.nodes if (dim := _dimension(node)) is not None]
    if not found:
        return
    shapes = {node: tuple(x.shape) for node, x in seen_values(gm, inputs()).items()}
    for node, dim in found:
        source: Any = node.args[0] if node.args else node.kwargs.get("input")
        shape = shapes.get(source)
        if shape is None:
            continue
        branches = _Branches(shapes, node, dim % len(shape)).of(source)
        if branches is None:
            continue
        with gm.graph.inserting_before(node):
            total = branches[0]
            for one in branches[1:]:
                total = gm.graph.call_function(torch.add, (total, one))
                total.meta.update(node.meta)
        node.replace_all_uses_with(total)
        gm.graph.erase_node(node)
    for node in gm.graph.find_nodes(op="call_function", target=torch.stack):
        _drop_checks(node)
    gm.graph.eliminate_dead_code()


def _drop_checks(stack: Node) -> None:
    """Drop assertions that there are as many branches as there are, for which ``stack`` is kept."""
    given: Any = dict(zip(("tensors", "dim"), stack.args, strict=False)) | stack.kwargs
    for shape in [user for user in stack.users if user.args[1:] == ("shape",)]:
        for size in [user for user in shape.users if user.args[1:] == (given.get("dim", 0),)]:
            for check in list(size.users):
                holds = check.target is operator.eq and len(given["tensors"]) in check.args
                asserts = [user for user in check.users if user.target is torch._assert]
                if holds and len(asserts) == len(check.users):
                    for node in (*asserts, check):
                        stack.graph.erase_node(node)


def _dimension(node: Node) -> int | None:
    """The one dimension that ``node`` adds up over, and drops."""
    is_method = node.op == "call_method" and node.target == "sum"
    if not is_method and node.target not in (torch.sum, aten.sum.dim_IntList):
        return None
    given: Any = given_by_name(node, ("input", "dim", "keepdim"))
    if given.keys() - {"input", "dim", "keepdim"} or given.get("keepdim", False) is not False:
        return None
    dims = given.get("dim")
    if isinstance(dims, list | tuple):
        dims = dims[0] if len(dims) == 1 else None
    return dims if type(dims) is int else None


class _Branches:
    """Takes tensors apart along ``dim``; new nodes stand before ``at``."""

    def __init__(self, shapes: dict[Node, tuple[int, ...]], at: Node, dim: int) -> None:
        self._shapes, self._at, self._dim = shapes, at, dim

    def of(self, x: Any) -> list[Any] | None:
        """``x`` branch by branch; None if other calls might have another number of branches."""
        if not isinstance(x, Node) or x not in self._shapes:
            return None
        if x.target is torch.stack:
            return self._stacked(x)
        if x.target in _MULTIPLIES or (x.op == "call_method" and x.target == "mul"):
            return self._multiplied(x)
        if x.target in _VIEWS or (x.op == "call_method" and x.target in ("reshape", "view")):
            return self._seen_as(x)
        return None

    def _stacked(self, x: Node) -> list[Any] | None:
        given: Any = dict(zip(("tensors", "dim"), x.args, strict=False)) | x.kwargs
        tensors, dim = given.get("tensors"), given.get("dim", 0)
        if not isinstance(tensors, list | tuple) or type(dim) is not int:
            return None
        fits = 1 < len(tensors) <= _MOST and dim % len(self._shapes[x]) == self._dim
        return list(tensors) if fits else None

    def _multiplied(self, x: Node) -> list[Any] | None:
        if len(x.args) != 2 or x.kwargs:
            return None
        known = [self.of(factor) for factor in x.args]
        count = next((len(one) for one in known if one is not None), None)
        if count is None:
            return None
        factors = []
        for factor, branches in zip(x.args, known, strict=True):
            branches = branches or self._selected(factor, count, len(self._shapes[x]))
            if branches is None or len(branches) != count:
                return None
            factors.append(branches)
        products = []
        for a, b in zip(*factors, strict=True):
            with x.graph.inserting_before(self._at):
                product = x.graph.call_function(torch.mul, (a, b))
            product.meta.update(x.meta)
            products.append(product)
        return products

    def _selected(self, x: Any, count: int, rank: int) -> list[Any] | None:
        """``x``, which is multiplied by as many branches, one after the other."""
        shape = self._shapes.get(x) if isinstance(x, Node) else None
        if shape is None or len(shape) != rank or shape[self._dim] not in (1, count):
            return None
        one = shape[self._dim] == 1
        with x.graph.inserting_before(self._at):
            found = [
                x.graph.call_function(torch.select, (x, self._dim, 0 if one else i))
                for i in range(count)
            ]
        for node in found:
            node.meta.update(x.meta)
        return found

    def _seen_as(self, x: Node) -> list[Any] | None:
        """Groups of neighbours, of the dimension that ``x`` sees as two."""
        source, *given = x.args
        sizes: Any = given[0] if len(given) == 1 else given
        before = self._shapes.get(source) if isinstance(source, Node) else None
        if before is None or x.kwargs or not isinstance(sizes, list | tuple):
            return None
        after, dim = self._shapes[x], self._dim
        if len(sizes) != len(after) or type(sizes[dim]) is not int or not 1 < after[dim] <= _MOST:
            return None
        count = after[dim]
        if before != (*after[:dim], count * after[dim + 1], *after[dim + 2 :]):
            return None
        with x.graph.inserting_before(self._at):
            chunks = x.graph.call_function(torch.chunk, (source, count, dim))
            found = [x.graph.call_function(operator.getitem, (chunks, i)) for i in range(count)]
        for node in (chunks, *found):
            node.meta.update(x.meta)
        return found
