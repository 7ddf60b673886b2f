"""What torch.export took for granted about the sizes of its inputs."""

from __future__ import annotations

import ast
from typing import Any

from torch.export import ExportedProgram

from x86quant.artifacts import size_conditions
from x86quant.artifacts.size_conditions import Condition
from x86quant.errors import ArtifactError


def conditions_of(program: ExportedProgram, inputs: int) -> tuple[Condition, ...]:
    """What export took for granted about sizes.

    Raises:
        ArtifactError: a condition has no form in a file.
    """
    found: dict[str, Condition] = {}

    def add(condition: Condition) -> None:
        found.setdefault(str(condition), condition)

    places: dict[str, Condition] = {}
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"][-inputs:]
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    for number, node in enumerate(placeholders):
        for dim, size in enumerate(node.meta["val"].shape):
            here = ["size", number, dim]
            name = str(size)
            if isinstance(size, int):
                add(["==", here, size])
            elif name in places:
                add(["==", here, places[name]])
            elif size.node.expr.is_symbol:
                places[name] = here
                if name in ranges:
                    least, most = (_finite(b) for b in (ranges[name].lower, ranges[name].upper))
                    if least:
                        add([">=", here, least])
                    if most is not None:
                        add(["<=", here, most])
    for code in program._guards_code or ():
        condition = size_conditions.parse(code, _place_of)
        if condition is None:
            raise ArtifactError(f"a condition on its sizes has no form in a file: {code[:200]}")
        add(condition)
    return size_conditions.check(list(found.values()), inputs)


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer else None


def _place_of(node: ast.AST) -> int | None:
    """The number of the input that export calls ``L['leaves'][3]``."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return None
    number = node.slice.value
    return number if isinstance(node.value, ast.Subscript) and type(number) is int else None
