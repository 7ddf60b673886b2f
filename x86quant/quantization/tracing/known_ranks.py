"""Tracing code that asks how many dimensions a tensor has: the answer is that of the example.

torch.fx stops at ``*x.shape[1:]``, ``len(x.shape)`` and ``[1] * (x.dim() - 2)``. But a graph takes
inputs of the example's ranks alone, and the ranks of what is computed from these follow, unless an
op on the way drops dimensions by their size. So what was traced so far is run on the example.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Graph, Interpreter, Node, Proxy
from torch.fx.proxy import Attribute
from torch.overrides import TorchFunctionMode

from x86quant.capture.lengths import lengths_by
from x86quant.capture.plain_numbers import plain
from x86quant.forms.size_conditions import Condition, Place
from x86quant.lowering.mutation import InPlaceProxy, InPlaceTracer
from x86quant.quantization.tracing.known_sizes import batch_sizes, count_of
from x86quant.quantization.tracing.traced_einops import let_einops_see_proxies

if TYPE_CHECKING:
    from x86quant.quantization.tracing.known_sizes import SizesAskedFor

#: Ops whose result may have another rank for other sizes.
BY_SIZE = frozenset(["squeeze", "squeeze_", "squeeze_copy"])

#: What makes a tensor of sizes, and takes no proxy for one.
_FACTORIES = ("arange", "eye", "full", "linspace", "ones", "zeros")
#: What tensors that are no proxies, buffers say, are spread by. They would ask for numbers.
_METHODS = ("expand", "narrow", "repeat", "reshape", "select", "view")
_GET_ITEM = torch.Tensor.__getitem__
#: Questions that the type of a tensor answers.
_BY_TYPE = frozenset(["is_complex", "is_floating_point"])


class RankedTracer(InPlaceTracer):
    """A tracer that knows the ranks of tensors, by an example of the inputs."""

    def __init__(self, example: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._example = example
        self._values: _Values | None = None
        self._with_more_rows: _Values | None = None
        self._sizes: SizesAskedFor | None = None

    @property
    def fixed(self) -> dict[Place, int]:
        """The sizes that the graph holds for, by input and dimension."""
        return {} if self._sizes is None else self._sizes.fixed

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What else must hold of the sizes of inputs."""
        return () if self._sizes is None else self._sizes.conditions

    def create_arg(self, a: Any) -> Any:
        """``a`` as an argument of a node; to torch.fx numbers of NumPy are none."""
        return super().create_arg(plain(a))

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> Graph:
        """The graph of ``root``."""
        let_einops_see_proxies()
        before = {name: getattr(torch, name) for name in _FACTORIES}
        try:
            for name, function in before.items():
                setattr(torch, name, self._traced(function, "call_function", function))
            for name in _METHODS:
                method = getattr(torch.Tensor, name)
                setattr(torch.Tensor, name, self._traced(method, "call_method", name))
            with _CutByProxies(self), lengths_by(root, self._length):
                return super().trace(root, concrete_args)
        finally:
            for name, function in before.items():
                setattr(torch, name, function)
            for name in _METHODS:
                if name in vars(torch.Tensor):
                    delattr(torch.Tensor, name)  # which has inherited it

    def _length(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            traced = self.value(value.node)
            if isinstance(traced, torch.Tensor) and traced.dim():
                shape: Any = value.shape
                return shape[0]
        return len(value)

    def _traced(self, function: Callable[..., Any], kind: str, target: Any) -> Callable[..., Any]:
        """``function``, of which a call with proxies is recorded."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _has_proxy((args, kwargs)):
                return self.create_proxy(kind, target, args, kwargs)
            return function(*args, **kwargs)

        return call

    def to_bool(self, obj: Proxy) -> bool:
        """Which branch is taken, if the type of a tensor decides, or sizes do."""
        name = str(getattr(obj.node.target, "__name__", obj.node.target))
        value = self.value(obj.node)
        if name not in _BY_TYPE and type(value) in (bool, int):
            value = self._symbols().truth(obj.node)
        return value if isinstance(value, bool) else bool(super().to_bool(obj))

    def proxy(self, node: Node) -> Proxy:
        """A proxy that knows its rank."""
        return _RankedProxy(node, self)

    @property
    def computes(self) -> bool:
        """Whether what is called is not traced at the moment, but run on the example."""
        runs = (self._values, self._with_more_rows, self._sizes)
        return any(one is not None and one.running for one in runs)

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
        if (number := self.number(obj.node)) is not None:
            return iter([obj[n] for n in range(number)])
        return super().iter(obj)

    def number(self, node: Node) -> int | None:
        """How many parts or rows ``node`` has, or the number that it is, if that is known."""
        if self._grows_with_batch(node):  # which takes less time than sizes that are symbols
            return None
        return self._symbols().number(node)

    def _symbols(self) -> SizesAskedFor:
        if self._sizes is None:
            # It imports the compiler, which takes as long as importing torch.
            from x86quant.quantization.tracing.known_sizes import SizesAskedFor

            assert isinstance(self.root, nn.Module)
            # Of a single row torch asks whether it is one.
            self._sizes = SizesAskedFor(self.root, self.graph, _with_more_rows(self._example))
        return self._sizes

    def _grows_with_batch(self, node: Node) -> bool:
        if self._with_more_rows is None:
            self._with_more_rows = _Values(self, _with_more_rows(self._example))
        here, there = count_of(self.value(node)), count_of(self._with_more_rows.of(node))
        return here is not None and there is not None and here != there

    def value(self, node: Node) -> Any:
        """The value of ``node`` for the example, if its rank is the same for all sizes."""
        if self._values is None:
            self._values = _Values(self, self._example)
        return self._values.of(node)


def _with_more_rows(example: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``example`` with one more in each of :func:`batch_sizes`."""
    found = list(example)
    for i, dim in batch_sizes(example):
        found[i] = torch.cat([found[i], found[i].narrow(dim, 0, 1)], dim)
    return found


def _has_proxy(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_proxy, value))
    if isinstance(value, dict):
        return any(map(_has_proxy, value.values()))
    if isinstance(value, slice):
        return _has_proxy((value.start, value.stop, value.step))
    return isinstance(value, Proxy)


class _CutByProxies(TorchFunctionMode):
    """Records how tensors that are no proxies are cut by sizes: ``buffer[:, : x.size(1)]``.

    And goes through torch's attention, which its function says is a step of its own.
    ``torch.Tensor.__getitem__`` cannot be set for the time of a trace as a method can: that would
    make every tensor a sequence to Python's C API, for as long as the process lives.
    """

    def __init__(self, tracer: RankedTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _GET_ITEM and _has_proxy(args[1:]) and not isinstance(args[0], Proxy):
            return self._tracer.create_proxy("call_function", operator.getitem, args, {})
        if func is F.multi_head_attention_forward:
            func = _ATTENTION
        return func(*args, **(kwargs or {}))


#: The same, but that it does not ask whether its arguments are proxies.
_ATTENTION = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda _: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


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
                        self._failed = name.rpartition(".")[2] in BY_SIZE
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
        if isinstance(value, torch.Size):
            return len(value)
        number = self.tracer.number(self.node)
        return super().__len__() if number is None else number

    def __index__(self) -> int:
        number = self.tracer.number(self.node) if self._is_number() else None
        if number is None:
            raise TypeError(f"{self.node.name} is not known as a number")
        return number

    def _is_number(self) -> bool:
        return type(self.tracer.value(self.node)) is int


class _RankedProxy(_Lengthy, InPlaceProxy):
    def __getattr__(self, k: str) -> Any:
        if k == "shape":
            return _SizeProxy(self, k)
        if k == "ndim" and (rank := self._rank()) is not None:
            return rank
        if k in ("dtype", "device") and (value := self._value()) is not None:
            return getattr(value, k)
        return super().__getattr__(k)

    def dim(self) -> Any:
        """The rank; a proxy if it is not known."""
        rank = self._rank()
        return super().__getattr__("dim")() if rank is None else rank

    def _rank(self) -> int | None:
        value = self._value()
        return None if value is None else value.dim()

    def _value(self) -> torch.Tensor | None:
        value = self.tracer.value(self.node)
        return value if isinstance(value, torch.Tensor) else None


class _SizeProxy(_Lengthy, Attribute):
    pass
