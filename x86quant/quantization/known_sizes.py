"""Sizes that a model's code counts with, where they are the same for all inputs.

``range(z.shape[1])`` needs a number while the model is traced. What was traced so far is run on
tensors without values whose sizes are symbols: a size in which no symbol is left is that number.
Whatever the example's sizes decided on the way is a condition of the graph. Sizes of 1 are decided
about everywhere; so the same is done for a single row, and the graph holds in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.printers import PythonPrinter


class ConstantSizes:
    """Sizes of what a graph computes, as far as it has been traced.

    Attributes:
        running: whether what is called is run without values at the moment.
    """

    def __init__(self, root: nn.Module, graph: Graph, example: Sequence[torch.Tensor]) -> None:
        self.running = False
        self._cases = [_Case(root, graph, sizes, example) for sizes in _sizes(example)]
        self._told = False

    def number(self, wanted: Node, *, fix: bool = False) -> int | None:
        """The value of ``wanted`` for all inputs that meet the conditions; None if it has none.

        If ``fix``, that it is what it is in the example becomes a condition.
        """
        self.running = True
        try:
            found = [one.number(wanted, fix=fix) for one in self._cases]
        finally:
            self.running = False
        if found[0] is None:
            return None
        pairs = zip(self._cases, found, strict=True)
        self._cases = [one for one, number in pairs if number == found[0]]
        self._told = True
        return found[0]

    @property
    def conditions(self) -> tuple[str, ...]:
        """What sizes of inputs, ``s[input][dimension]``, must be for the numbers that were told."""
        if not self._told:
            return ()
        cases = [one.conditions for one in self._cases]
        always = [one for one in cases[0] if all(one in other for other in cases)]
        rest = [[f"({one})" for one in case if one not in always] for case in cases]
        if not all(rest):
            return tuple(always)
        any_of = dict.fromkeys(f"({' and '.join(one)})" for one in rest)
        return (*always, " or ".join(any_of))


def _sizes(example: Sequence[torch.Tensor]) -> list[list[list[int]]]:
    """The sizes of ``example``, and those with one row; if it has one, with two, and its own.

    Rows are the first dimension; of indices that are stacked, another.
    """
    sizes = [list(x.shape) for x in example]
    rows = next((x[0] for x in sizes if x), None)
    if rows is None:
        return [sizes]
    other = 2 if rows == 1 else 1
    first = [[other, *x[1:]] if x and x[0] == rows else x for x in sizes]
    stacked = [not x.is_floating_point() and x.dim() > 1 and len(x) != rows for x in example]
    pairs = list(zip(first, stacked, strict=True))
    inner = [[x[0], *(other if n == rows else n for n in x[1:])] if s else x for x, s in pairs]
    pairs = list(zip(inner, stacked, strict=True))
    single = [[*x[:-1], other] if s else x for x, s in pairs]  # and bags of one
    # A single row decides about its number, so it never comes first.
    found = [inner, sizes] if rows == 1 else [sizes, first, inner, single]
    return [x for number, x in enumerate(found) if x not in found[:number]]


class _Case(Interpreter):
    """What is decided by one choice of sizes."""

    def __init__(
        self,
        root: nn.Module,
        graph: Graph,
        sizes: Sequence[Sequence[int]],
        example: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self._shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self._mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._names: dict[sympy.Basic, sympy.Basic] = {}
        self._failed = False
        given = [torch.empty(s, dtype=x.dtype) for s, x in zip(sizes, example, strict=True)]
        self.args_iter = iter([self._without_values(n, x) for n, x in enumerate(given)])

    def _without_values(self, number: int, x: torch.Tensor) -> torch.Tensor:
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.dim())  # type: ignore[var-annotated]
        found = self._mode.from_tensor(x, symbolic_context=context)
        for dim, size in enumerate(found.shape):
            assert isinstance(size, torch.SymInt)
            self._names[size.node._expr] = sympy.Symbol(f"s[{number}][{dim}]")
        return found

    def number(self, wanted: Node, *, fix: bool) -> int | None:
        """The value of ``wanted``, if no input changes it or it is to be fixed."""
        try:
            found = self._value(wanted)
        except Exception:  # of whatever is called
            self._failed = True
        if self._failed or self._shapes.deferred_runtime_asserts:
            return None
        if isinstance(found, torch.SymInt) and (fix or found.node.expr.is_Integer):
            return int(found)  # which notes a condition if it is none yet
        return found if type(found) is int else None

    def _value(self, wanted: Node) -> Any:
        with torch.no_grad(), self._mode:
            for node in self.graph.nodes:
                if node not in self.env:
                    self.env[node] = self.run_node(node)
        return self.env[wanted]

    @property
    def conditions(self) -> list[str]:
        """What was decided by sizes."""
        found = [guard.expr.xreplace(self._names) for guard in self._shapes.guards]
        return list(dict.fromkeys(PythonPrinter().doprint(one) for one in found))
