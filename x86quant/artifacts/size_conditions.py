"""Conditions on the sizes of inputs, as plain data: what a graph of one example holds for.

A condition is a list: an operator and its operands, which are numbers or such lists again::

    ["<=", ["size", 0, 1], 40]                 the second size of the first input is at most 40
    ["==", ["%", ["size", 0, 2], 7], 0]        its third is a multiple of 7
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from x86quant.errors import ArtifactError

Condition = list[Any]
Shapes = Sequence[Sequence[int]]

_MAX_DEPTH = 24
_MAX_BITS = 63
_MAX_CONDITIONS = 10_000

_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "min": min,
    "max": max,
    "and": lambda *operands: all(operands),
    "or": lambda *operands: any(operands),
    "not": operator.not_,
}
_BOTH = frozenset({"min", "max"})
_LOOSE = _BOTH | {"and", "or"}
_SPELLED: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip


def holds(condition: Any, shapes: Shapes) -> bool:
    """Whether ``condition`` is true of inputs of ``shapes``."""
    try:
        return bool(_value(condition, shapes))
    except (ZeroDivisionError, IndexError):
        return False


def _value(expression: Any, shapes: Shapes) -> int:
    if isinstance(expression, int):
        return expression
    name, *operands = expression
    if name == "size":
        return int(shapes[operands[0]][operands[1]])
    result: int = _OPERATORS[name](*(_value(operand, shapes) for operand in operands))
    return result


def excludes_one(condition: Condition) -> bool:
    """Whether it asks that a size is not one."""
    operator, place, *value = condition
    is_size = isinstance(place, list) and place[0] == "size"
    return is_size and [operator, *value] in (["!=", 1], [">", 1], [">=", 2])


def text(expression: Any, size: Callable[[int, int], str]) -> str:
    """``expression`` as Python spells it; ``size`` spells the size of an input's dimension."""
    if isinstance(expression, int):
        return str(expression)
    name, *operands = expression
    if name == "size":
        return size(*operands)
    parts = [text(operand, size) for operand in operands]
    if name in _BOTH:
        return f"{name}({', '.join(parts)})"
    nested = [
        f"({part})" if isinstance(operand, list) and operand[0] != "size" else part
        for part, operand in zip(parts, operands, strict=True)
    ]
    return f"not {nested[0]}" if name == "not" else f" {name} ".join(nested)


def sizes_in(expression: Any) -> Iterator[tuple[int, int]]:
    """The sizes that ``expression`` is about: numbers of inputs, and dimensions."""
    if isinstance(expression, list):
        if expression[0] == "size":
            yield expression[1], expression[2]
        else:
            for operand in expression[1:]:
                yield from sizes_in(operand)


def parse(code: str, place_of: Callable[[ast.AST], int | None]) -> Condition | None:
    """A condition that torch.export wrote as Python, or None where it has no form here.

    ``place_of`` numbers the input that an expression names.
    """
    try:
        found: Condition = _parsed(ast.parse(code, mode="eval").body, place_of)
    except (SyntaxError, LookupError, ValueError):
        return None
    return found


def _parsed(node: ast.AST, place_of: Callable[[ast.AST], int | None]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ["-", 0, _parsed(node.operand, place_of)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not", _parsed(node.operand, place_of)]
    if isinstance(node, ast.BinOp):
        operands = [_parsed(side, place_of) for side in (node.left, node.right)]
        return [_SPELLED[type(node.op)], *operands]
    if isinstance(node, ast.BoolOp):
        return [_SPELLED[type(node.op)], *(_parsed(value, place_of) for value in node.values)]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operands = [_parsed(side, place_of) for side in (node.left, node.comparators[0])]
        return [_SPELLED[type(node.ops[0])], *operands]
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(node, ast.Call) and isinstance(function, ast.Name) and function.id in _BOTH:
        return [function.id, *(_parsed(argument, place_of) for argument in node.args)]
    size = _size(node, place_of)
    if size is None:
        raise ValueError(ast.unparse(node))
    return size


def _size(node: ast.AST, place_of: Callable[[ast.AST], int | None]) -> Condition | None:
    """``<input>.size()[1]`` or ``<input>[1]`` as ``["size", number, 1]``."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return None
    value, dim = node.value, node.slice.value
    if isinstance(value, ast.Call):
        is_size = isinstance(value.func, ast.Attribute) and value.func.attr == "size"
        value = value.func.value if is_size else value  # type: ignore[attr-defined]
    place = place_of(value)
    return None if place is None or type(dim) is not int else ["size", place, dim]


def check(conditions: Any, inputs: int) -> tuple[Condition, ...]:
    """``conditions`` as read from a file.

    Raises:
        ArtifactError: they are no such conditions.
    """
    if not isinstance(conditions, list) or len(conditions) > _MAX_CONDITIONS:
        raise ArtifactError("its conditions on sizes are no list")
    for condition in conditions:
        if not isinstance(condition, list):
            raise ArtifactError("a condition on sizes is no list")
        _check(condition, inputs, 0)
    return tuple(conditions)


def _check(expression: Any, inputs: int, depth: int) -> None:
    if type(expression) is int and expression.bit_length() <= _MAX_BITS:
        return
    if depth >= _MAX_DEPTH or not isinstance(expression, list) or len(expression) < 2:
        raise ArtifactError(f"a condition on sizes is not valid: {str(expression)[:80]}")
    name, *operands = expression
    if name == "size":
        if len(operands) != 2 or not all(type(x) is int and x >= 0 for x in operands):
            raise ArtifactError(f"a condition names no size: {str(expression)[:80]}")
        if operands[0] >= inputs:
            raise ArtifactError(f"a condition is on input {operands[0]}, and there are {inputs}")
        return
    if not isinstance(name, str) or name not in _OPERATORS:
        raise ArtifactError(f"a condition has the unknown operator {str(name)[:80]!r}")
    if name not in _LOOSE and len(operands) != (1 if name == "not" else 2):
        raise ArtifactError(f"the operator {name!r} of a condition has {len(operands)} operands")
    for operand in operands:
        _check(operand, inputs, depth + 1)
