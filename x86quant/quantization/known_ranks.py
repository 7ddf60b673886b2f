"""Tracing code that asks for ranks, and counts with sizes that are the same for all inputs.

torch.fx stops at ``*x.shape[1:]``, ``len(x.shape)`` and ``[1] * (x.dim() - 2)``. But a graph takes
inputs of the example's ranks alone, and the ranks of what is computed from these follow, unless an
op on the way drops dimensions by their size. So what was traced so far is run on the example.
Numbers of vectors are told by :mod:`x86quant.quantization.known_sizes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Interpreter, Node, Proxy
from torch.fx.proxy import Attribute

from x86quant.lowering.mutation import InPlaceProxy, InPlaceTracer

if TYPE_CHECKING:
    from x86quant.quantization.known_sizes import ConstantSizes

#: Ops whose result may have another rank for other sizes.
_BY_SIZE = frozenset(["squeeze", "squeeze_", "squeeze_copy"])


class RankedTracer(InPlaceTracer):
    """A tracer that knows the ranks of tensors, by an example of the inputs, and some sizes."""

    def __init__(self, example: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._example = example
        self._values: _Values | None = None
        self._sizes: ConstantSizes | None = None

    def proxy(self, node: Node) -> Proxy:
        """A proxy that knows its rank."""
        return _RankedProxy(node, self)

    @property
    def computes(self) -> bool:
        """Whether what is called is not traced at the moment, but run on the example."""
        return any(one is not None and one.running for one in (self._values, self._sizes))

    @property
    def conditions(self) -> tuple[str, ...]:
        """What sizes of inputs must be for the numbers that tracing counted with."""
        return () if self._sizes is None else self._sizes.conditions

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        """An attribute of a module: a proxy if it is a parameter."""
        if self.computes:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def iter(self, obj: Any) -> Iterator[Any]:
        """The elements of a shape, whose number is a rank."""
        shape = self.value(obj.node)
        if isinstance(shape, torch.Size):
            return iter([obj[n] for n in range(len(shape))])
        # The indices of all tables, stacked; their number becomes a condition.
        if isinstance(shape, torch.Tensor) and shape.dim() > 1 and not shape.is_floating_point():
            count = self.number(obj.shape[0].node, fix=True)
            if count is not None:
                return iter([obj[n] for n in range(count)])
        return super().iter(obj)

    def value(self, node: Node) -> Any:
        """The value of ``node`` for the example, if its rank is the same for all sizes."""
        if self._values is None:
            self._values = _Values(self, self._example)
        return self._values.of(node)

    def number(self, node: Node, *, fix: bool = False) -> int | None:
        """The value of ``node`` if it is a number that no input changes, or is to be fixed."""
        if self._sizes is None:
            # Symbols take as long to import as half of torch, and few models count.
            from x86quant.quantization.known_sizes import ConstantSizes

            assert isinstance(self.root, nn.Module)
            self._sizes = ConstantSizes(self.root, self.graph, self._example)
        return self._sizes.number(node, fix=fix)


class _Values(Interpreter):
    """Runs the graph as far as it was traced."""

    def __init__(self, tracer: RankedTracer, example: Sequence[torch.Tensor]) -> None:
        assert isinstance(tracer.root, nn.Module)
        super().__init__(tracer.root, garbage_collect_values=False, graph=tracer.graph)
        self.args_iter = iter([x.clone() for x in example])
        self.running = False
        self._failed = False

    def of(self, wanted: Node) -> Any:
        """The value of ``wanted``; None if it cannot be had, or its rank depends on sizes."""
        self.running = True
        try:
            with torch.no_grad():
                for node in self.graph.nodes:
                    if self._failed:
                        return None
                    if node not in self.env:
                        name = str(getattr(node.target, "__name__", node.target))
                        self._failed = name.rpartition(".")[2] in _BY_SIZE
                        self.env[node] = self.run_node(node)
        except Exception:  # of whatever is called
            self._failed = True
        finally:
            self.running = False
        return None if self._failed else self.env[wanted]


class _Lengthy(Proxy):
    """Knows its length, if it is a shape."""

    tracer: RankedTracer

    def __len__(self) -> int:
        value = self.tracer.value(self.node)
        return len(value) if isinstance(value, torch.Size) else super().__len__()


class _RankedProxy(_Lengthy, InPlaceProxy):
    def __getattr__(self, k: str) -> Any:
        if k == "shape":
            return _SizeProxy(self, k)
        if k == "ndim" and (rank := self._rank()) is not None:
            return rank
        return super().__getattr__(k)

    def dim(self) -> Any:
        """The rank; a proxy if it is not known."""
        rank = self._rank()
        return super().__getattr__("dim")() if rank is None else rank

    def __index__(self) -> int:
        number = self.tracer.number(self.node)
        if number is None:
            raise TypeError(f"{self.node.name} is a number that depends on the input")
        return number

    def _rank(self) -> int | None:
        value = self.tracer.value(self.node)
        return value.dim() if isinstance(value, torch.Tensor) else None


class _SizeProxy(_Lengthy, Attribute):
    pass
