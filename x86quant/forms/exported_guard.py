"""The guard of a graph that torch.export made: what it took for granted about its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from x86quant.errors import UnsupportedError
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.forms.size_conditions import Condition, parse, size_of


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
