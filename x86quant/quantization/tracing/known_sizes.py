"""Tracing code whose steps are counted by a size: the graph is for that size then.

``for step in x.unbind(1)`` and ``range(x.size(1))`` need a number. What was traced so far is run on
fake tensors whose sizes are symbols: a number that depends on none of these is the same for all
inputs, and otherwise the sizes of inputs that it depends on are fixed, and the graph is guarded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from sympy import Eq, Not, Symbol  # type: ignore[import-untyped]
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    statically_known_true,
)
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv
from torch.utils._sympy.printers import PythonPrinter

from x86quant.calling.running import OpWatch
from x86quant.capture.exported import check_sizes, without_fake_cache
from x86quant.errors import UnsupportedError
from x86quant.forms.size_conditions import Condition, Place, holds, parse
from x86quant.terminal.silence import silent

_T = TypeVar("_T")
#: Numbers with and without small factors.
_OTHER_ROWS = (1, 2, 3, 7, 12)


def batch_sizes(example: Sequence[torch.Tensor]) -> set[Place]:
    """Where inputs have the size of a batch: in front, or, of indices of many tables, behind it."""
    rows = next((len(x) for x in example if x.dim()), None)
    found: set[Place] = set()
    for i, x in enumerate(example):
        stacked = not x.is_floating_point() and x.dim() > 1 and len(x) != rows
        dims = range(1, x.dim()) if stacked else range(min(1, x.dim()))
        found.update((i, dim) for dim in dims)
    return found


def count_of(value: Any) -> int | None:
    """How many parts or rows ``value`` has, or the number that it is; None if it has neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | torch.SymInt):
        return int(value)
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    return len(value) if isinstance(value, tuple | list) else None


class _NoOtherShapes(OpWatch):  # type: ignore[no-untyped-call]
    """Refuses what gives a tensor itself another shape.

    Torch ends the process where that shape is of symbols (``squeeze_`` of a dimension does).
    """

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``."""
        if torch.Tag.inplace_view in func.tags:
            raise UnsupportedError(f"{func} of symbols")
        return func(*args, **kwargs)


class _NewForReshaped(TorchFunctionMode):
    """Gives a new tensor where another shape is asked of one.

    Torch asks how that one lies in memory: with sizes that are symbols this takes a tenth of a
    second, and what it takes for granted then limits sizes that are meant to be free.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # By name: the methods are other functions while a model is traced.
        if getattr(func, "__name__", "") in ("reshape", "view") and not kwargs:
            shape = _shape_for(*args)
            if shape is not None:
                return args[0].new_empty(shape)
        return func(*args, **(kwargs or {}))


def _shape_for(x: torch.Tensor, *sizes: Any) -> list[Any] | None:
    """The shape that ``sizes`` give ``x``; None if they are no sizes, or give none."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        (sizes,) = sizes
    if not all(isinstance(size, int | torch.SymInt) for size in sizes):
        return None
    inferred = [i for i, size in enumerate(sizes) if type(size) is int and size == -1]
    found = list(sizes)
    for i in inferred:
        known = math.prod(sizes[:i] + sizes[i + 1 :])
        if type(known) is int and known <= 0:  # of nothing, or of two that are not given
            return None
        found[i] = x.numel() // known
    return found


class SizesAskedFor(Interpreter):
    """Runs a graph that is being traced on fake tensors.

    Attributes:
        fixed: the sizes of inputs that what was asked for depends on.
        conditions: what else must hold of sizes.
        running: whether what is called now is not traced, but run.
    """

    def __init__(self, root: nn.Module, graph: Graph, example: Sequence[torch.Tensor]) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.fixed: dict[Place, int] = {}
        self.conditions: tuple[Condition, ...] = ()
        self.running = False
        self._sizes = {(i, d): n for i, x in enumerate(example) for d, n in enumerate(x.shape)}
        self._batches = batch_sizes(example)
        self._shapes = ShapeEnv(
            duck_shape=False,
            specialize_zero_one=False,
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
        )
        with without_fake_cache():
            self._mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        fakes = [self._fake(x, f"x{number}") for number, x in enumerate(example)]
        self._free: dict[Place, Any] = {
            (i, d): n
            for i, x in enumerate(fakes)
            for d, n in enumerate(x.shape)
            if isinstance(n, torch.SymInt)
        }
        self._symbols = {place: size.node.expr for place, size in self._free.items()}
        self._compared_so_far: list[Condition] = []
        self.args_iter = iter(fakes)

    def _fake(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._mode.from_tensor(
            x,
            source=ConstantSource(name),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.dim()),
        )

    def run_node(self, n: Node) -> Any:
        """The value of ``n``, if its sizes are no formulas that work takes minutes with."""
        found = super().run_node(n)
        check_sizes([found] if isinstance(found, torch.Tensor) else [])
        return found

    def number(self, wanted: Node) -> int | None:
        """How many parts or rows ``wanted`` has, or the number that it is; None if none is known.

        The size of a batch is not fixed, and so no number that depends on it is known.
        """
        return self._asked(wanted, count_of)

    def truth(self, wanted: Node) -> bool | None:
        """What a comparison of sizes comes to, or whether a number of them is another than 0.

        Unless it is the same for all sizes, the graph holds for those that it is true of, or for
        those of the example where no condition can say which these are. Batches are not limited.
        """
        return self._asked(wanted, self._compared)

    def _compared(self, value: Any) -> bool | None:
        if isinstance(value, torch.SymInt):
            value = value != 0
        if not isinstance(value, torch.SymBool):
            return bool(value) if isinstance(value, bool | int) else None
        if statically_known_true(value):
            return True
        if statically_known_true(value.__sym_not__()):
            return False
        expression = value.node.expr
        if any(self._symbols[place] in expression.free_symbols for place in self._batches):
            return None
        found = bool(value.node.hint)
        try:
            self._compared_so_far += self._conditions(expression if found else Not(expression))
        except UnsupportedError:
            for symbol in expression.free_symbols:
                self._fix(symbol)
        return found

    def _fix(self, symbol: Symbol) -> None:
        """Let the graph hold for the example's size alone where ``symbol`` stands."""
        for place, size in self._free.items():
            if self._symbols[place] == symbol:
                int(size)

    def _asked(self, wanted: Node, answer: Callable[[Any], _T | None]) -> _T | None:
        self.running = True
        try:
            with self._symbols_kept(), torch.no_grad():
                for node in self.graph.nodes:
                    if node not in self.env:
                        self.env[node] = self.run_node(node)
                found = answer(self.env[wanted])
        except Exception:  # of whatever is called
            return None
        finally:
            self.running = False
        fixed, conditions = self._assumed()
        if found is None or self._batches & fixed.keys() or self._limit_batches(conditions):
            return None
        self.fixed, self.conditions = fixed, conditions
        return found

    @contextlib.contextmanager
    def _symbols_kept(self) -> Iterator[None]:
        """A block in which ops run on fake tensors.

        With torch's decompositions in Python: those in C++ ask for numbers (``interpolate`` does).
        """
        with enable_python_dispatcher(), silent(), self._mode, _NoOtherShapes(), _NewForReshaped():  # type: ignore[no-untyped-call]
            yield

    def _limit_batches(self, conditions: Iterable[Condition]) -> bool:
        """Whether a condition would not hold for a batch of another size.

        Torch asks more than it needs to know: whether ``rows * pixels`` is a multiple of ``4 *
        rows``, say.
        """
        for rows in _OTHER_ROWS:
            shapes: list[list[int]] = []
            for (number, dim), size in sorted(self._sizes.items()):
                shapes += [[] for _ in range(number + 1 - len(shapes))]
                shapes[number].append(rows if (number, dim) in self._batches else size)
            if not all(holds(condition, shapes) for condition in conditions):
                return True
        return False

    def _assumed(self) -> tuple[dict[Place, int], tuple[Condition, ...]]:
        """The sizes that were taken for numbers so far, and what else must be equal to one."""
        now = {place: self._shapes.replace(symbol) for place, symbol in self._symbols.items()}
        fixed = {place: self._sizes[place] for place, size in now.items() if size.is_number}
        conditions = [*self._compared_so_far]
        for guard in self._shapes.guards:
            equation = self._shapes.replace(guard.expr)
            sides = getattr(equation, "args", ())
            if isinstance(equation, Eq) and any(side.is_number for side in sides):
                conditions += self._conditions(equation)
        return fixed, tuple(conditions)

    def _conditions(self, expression: Any) -> list[Condition]:
        """What ``expression``, of symbols, says of the sizes of inputs, if it is not always so."""
        names = {symbol: Symbol(f"s[{i}][{d}]") for (i, d), symbol in self._symbols.items()}
        whole = expression.replace(CeilToInt, _rounded_up).xreplace(names)
        return [] if whole == True else [parse(PythonPrinter().doprint(whole))]  # noqa: E712


def _rounded_up(value: Any) -> Any:
    """The integer above ``value``, without fractions where it is one of sizes."""
    number, quotient = value.as_coeff_Add()
    if isinstance(quotient, IntTrueDiv) and float(number).is_integer():
        above, below = quotient.args
        return int(number) + FloorDiv(above + below - 1, below)
    return CeilToInt(value)
