"""``Guard``: which tensors a graph holds for.

A graph holds for the calls that it was traced with: for ranks, types, and what the tracer had to
assume about sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from x86quant.errors import UnsupportedError
from x86quant.forms import size_conditions
from x86quant.forms.size_conditions import Condition, Shapes, parse, size_of


@dataclasses.dataclass(frozen=True, slots=True)
class GuardedInput:
    """What one tensor of a call must be.

    Attributes:
        name: what it is called in messages.
        dtype: its type.
        rank: how many dimensions it has.
        fixed: dimensions that have only one size, and that.
        single: the other dimensions in which size 1 was verified; None if it need not be.
    """

    name: str
    dtype: torch.dtype
    rank: int
    fixed: tuple[tuple[int, int], ...] = ()
    single: frozenset[int] | None = None

    def refusal(self, x: Any) -> str | None:
        """Why ``x`` is not such a tensor, or None."""
        if x.dtype is not self.dtype:
            return f"{self.name} is {x.dtype}, not {self.dtype}"
        if x.dim() != self.rank:
            return f"{self.name} has {x.dim()} dimensions, not {self.rank}"
        if x.layout is not torch.strided or x.device.type != "cpu":
            return f"{self.name} is not a dense tensor on the CPU"
        shape = x.shape
        for dim, size in self.fixed:
            if shape[dim] != size:
                return f"{self.name} has size {shape[dim]} in dimension {dim}, not {size}"
        if self.single is not None:
            fixed = [dim for dim, _ in self.fixed]
            for dim, size in enumerate(shape):
                if size < 2 and dim not in fixed and (size == 0 or dim not in self.single):
                    return f"{self.name} has size {size} in dimension {dim}"
        return None


@dataclasses.dataclass(frozen=True)
class Guard:
    """Which tensors a graph holds for.

    Attributes:
        inputs: what each tensor must be.
        conditions: relations between their sizes.
    """

    inputs: tuple[GuardedInput, ...]
    conditions: tuple[Condition, ...] = ()
    _all_hold: Callable[[Shapes], bool] = dataclasses.field(init=False, repr=False, compare=False)
    #: The sizes of the latest call for which they hold: most calls are like the one before.
    _latest: list[Any] = dataclasses.field(
        default_factory=lambda: [None], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        checked = size_conditions.check(self.conditions, len(self.inputs))
        object.__setattr__(self, "conditions", checked)
        object.__setattr__(self, "_all_hold", size_conditions.evaluator(checked))

    def __reduce__(self) -> tuple[Any, ...]:
        return Guard, (self.inputs, self.conditions)  # functions cannot be pickled

    @property
    def is_trivial(self) -> bool:
        """Whether it asks for types and ranks alone."""
        return not self.conditions and all(not x.fixed and x.single is None for x in self.inputs)

    def refusal(self, tensors: Sequence[Any]) -> str | None:
        """Why the graph does not hold for ``tensors``, or None."""
        for spec, x in zip(self.inputs, tensors, strict=True):
            if (reason := spec.refusal(x)) is not None:
                return reason
        if self.conditions:
            shapes = [x.shape for x in tensors]
            if not self._hold_for(shapes):
                wrong = next(c for c in self.conditions if not size_conditions.holds(c, shapes))
                wanted = size_conditions.text(wrong, lambda number: self.inputs[number].name)
                return f"sizes {[tuple(s) for s in shapes]} do not meet {wanted}"
        return None

    def _hold_for(self, shapes: list[Any]) -> bool:
        if torch.compiler.is_compiling():  # sizes are symbols, and no call is to be remembered
            return self._all_hold(shapes)
        if shapes != self._latest[0]:
            if not self._all_hold(shapes):
                return False
            self._latest[0] = shapes
        return True


def guard_of(
    program: ExportedProgram,
    names: Sequence[str],
    leaves: Sequence[torch.Tensor],
    *,
    doubts_one: bool,
) -> Guard:
    """Which inputs, of these names and like ``leaves``, the graph of ``program`` holds for.

    With ``doubts_one`` torch.export took no size to be one, so that each dimension in which it may
    be has to be verified; the bounds on sizes that follow from that alone are left out.

    Raises:
        UnsupportedError: a condition has no form here.
    """
    shapes = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    ]
    known = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    conditions: list[Condition] = []
    places: dict[Any, Condition] = {}  # by symbol, where it is first found
    computed: list[tuple[Condition, Any]] = []
    inputs = []
    for number, (name, x, shape) in enumerate(zip(names, leaves, shapes, strict=True)):
        fixed = []
        for dim, size in enumerate(shape):
            here = size_of(number, dim)
            if str(size).isdigit():  # a number, or a symbol that became one
                fixed.append((dim, int(str(size))))
            elif not size.node.expr.is_symbol:
                computed.append((here, size.node.expr))
            elif (symbol := size.node.expr) in places:
                conditions.append(("==", here, places[symbol]))
            else:
                places[symbol] = here
                if str(symbol) in known:
                    conditions += _bounds(here, known[str(symbol)], 2 if doubts_one else 0)
        single = frozenset[int]() if doubts_one else None
        inputs.append(GuardedInput(name, x.dtype, x.dim(), tuple(fixed), single))
    conditions += [_computed(here, formula, places) for here, formula in computed]
    conditions += map(parse, program._guards_code or ())
    return Guard(tuple(inputs), tuple(conditions))


def _bounds(size: Condition, bounds: Any, least: int) -> list[Condition]:
    """The bounds that are numbers, the lower one if it is above ``least``."""
    found = []
    if bounds.lower.is_Integer and int(bounds.lower) > least:
        found.append((">=", size, int(bounds.lower)))
    if bounds.upper.is_Integer:
        found.append(("<=", size, int(bounds.upper)))
    return found


def _computed(here: Condition, formula: Any, places: dict[Any, Condition]) -> Condition:
    """That the size ``here`` is what ``formula`` gives of others."""
    # Not at the top: importing them takes as long as loading a model.
    from sympy import Symbol  # type: ignore[import-untyped]
    from torch.utils._sympy.printers import PythonPrinter

    symbols = {symbol: Symbol(f"s[{p[1]}][{p[2]}]") for symbol, p in places.items()}
    spelled = formula.xreplace(symbols)
    if not spelled.free_symbols <= set(symbols.values()):
        raise UnsupportedError(f"the size {formula} of an input follows from no other")
    return ("==", here, parse(f"{PythonPrinter().doprint(spelled)} == 0")[1])
