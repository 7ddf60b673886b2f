"""What torch.export took for granted about the sizes of its inputs."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram

from x86quant.errors import UnsupportedError
from x86quant.forms.size_conditions import Condition, check, parse, size_of


def conditions_of(program: ExportedProgram, inputs: int) -> tuple[Condition, ...]:
    """What export took for granted about sizes.

    Raises:
        UnsupportedError: a condition has no form here.
    """
    # Not at the top: importing them takes as long as loading a model.
    from sympy import Symbol  # type: ignore[import-untyped]
    from torch.utils._sympy.printers import PythonPrinter

    found: list[Condition] = []
    places: dict[str, Condition] = {}
    symbols: dict[Any, Symbol] = {}
    computed: list[tuple[Condition, Any]] = []
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"][-inputs:]
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    for number, node in enumerate(placeholders):
        for dim, extent in enumerate(node.meta["val"].shape):
            here = size_of(number, dim)
            name = str(extent)
            if isinstance(extent, int):
                found.append(("==", here, extent))
            elif name in places:
                found.append(("==", here, places[name]))
            elif extent.node.expr.is_symbol:
                places[name] = here
                symbols[extent.node.expr] = Symbol(f"s[{number}][{dim}]")
                if name in ranges:
                    least, most = (_finite(b) for b in (ranges[name].lower, ranges[name].upper))
                    if least:
                        found.append((">=", here, least))
                    if most is not None:
                        found.append(("<=", here, most))
            else:
                computed.append((here, extent.node.expr))
    for here, expression in computed:  # a size of an input that others determine
        spelled = expression.xreplace(symbols)
        if not spelled.free_symbols <= set(symbols.values()):
            raise UnsupportedError(f"the size {expression} of an input follows from no other")
        found.append(("==", here, parse(f"{PythonPrinter().doprint(spelled)} == 0")[1]))
    found += map(parse, program._guards_code or ())
    return check(found, inputs)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None
