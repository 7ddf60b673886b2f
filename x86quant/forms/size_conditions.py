"""Conditions on the sizes of inputs, as plain data: what a graph of one example holds for.

A condition is a tuple: an operator and its operands, which are numbers or such tuples again::

    ("<=", ("size", 0, 1), 40)                 the second size of the first input is at most 40
    ("==", ("%", ("size", 0, 2), 7), 0)        its third is a multiple of 7

Everything that guards a graph speaks this language: tracers write it, files hold it, messages print
it, and a guard asks :func:`evaluator` once for a function that tells whether it holds.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from x86quant.errors import UnsupportedError

Condition = tuple[Any, ...]
Shapes = Sequence[Sequence[int]]
#: A dimension of an input, by the input's number.
Place = tuple[int, int]

_MAX_DEPTH = 24
_MAX_BITS = 63
_MAX_CONDITIONS = 10_000
_MAX_POWER = 8

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
#: By what torch's printers call them: since 2.14 by the functions for its symbols.
_EXTREMES = {f"{home}{name}": name for home in ("", "torch.sym_") for name in _BOTH}
_LOOSE = _BOTH | {"and", "or"}
_SPELLED: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip


def size_of(number: int, dim: int) -> Condition:
    """The size of a dimension of the input of this number."""
    return ("size", number, dim)


# --- whether they hold ---


def holds(condition: Condition, shapes: Shapes) -> bool:
    """Whether ``condition`` is true of inputs of ``shapes``."""
    return evaluator((condition,))(shapes)


def evaluator(conditions: Iterable[Condition]) -> Callable[[Shapes], bool]:
    """Tells whether all of ``conditions`` are true of inputs of given shapes."""
    tests = [_function(condition) for condition in dict.fromkeys(conditions)]

    def all_hold(shapes: Shapes) -> bool:
        try:
            for test in tests:
                if not test(shapes):
                    return False
        except (ZeroDivisionError, IndexError):  # what it asks has no meaning at such sizes
            return False
        return True

    return all_hold


def _function(expression: Any) -> Callable[[Shapes], Any]:
    """``expression`` as a function of shapes.

    Functions that do most of the work in one call: a guard is asked at each call of a model.
    """
    if isinstance(expression, int):
        return lambda shapes: expression
    name, *operands = expression
    if name == "size":
        number, dim = operands
        return lambda shapes: shapes[number][dim]
    compute = _OPERATORS[name]
    if len(operands) == 2:
        left, right = operands
        if _is_size(left):
            _, i, d = left
            if isinstance(right, int):
                return lambda shapes: compute(shapes[i][d], right)
            if _is_size(right):
                _, j, e = right
                return lambda shapes: compute(shapes[i][d], shapes[j][e])
        if isinstance(right, int):
            inner = _function(left)
            return lambda shapes: compute(inner(shapes), right)
    parts = [_function(operand) for operand in operands]
    return lambda shapes: compute(*[part(shapes) for part in parts])


def _is_size(expression: Any) -> bool:
    return isinstance(expression, tuple) and expression[0] == "size"


def excludes_one(condition: Condition) -> bool:
    """Whether it asks that a size is not one."""
    name, place, *value = condition
    return _is_size(place) and [name, *value] in (["!=", 1], [">", 1], [">=", 2])


def sizes_in(expression: Any) -> Iterator[Place]:
    """The sizes that ``expression`` is about: numbers of inputs, and dimensions."""
    if _is_size(expression):
        yield expression[1], expression[2]
    elif isinstance(expression, tuple):
        for operand in expression[1:]:
            yield from sizes_in(operand)


def renumbered(expression: Any, inputs: Sequence[int]) -> Any:
    """``expression`` about the inputs ``inputs`` in place of the first, the second and so on."""
    if _is_size(expression):
        return size_of(inputs[expression[1]], expression[2])
    if isinstance(expression, tuple):
        return (expression[0], *(renumbered(x, inputs) for x in expression[1:]))
    return expression


# --- to be read ---


def text(expression: Any, name_of: Callable[[int], str]) -> str:
    """``expression`` as Python spells it; ``name_of`` gives the name of the input of a number."""
    if isinstance(expression, int):
        return str(expression)
    name, *operands = expression
    if name == "size":
        return f"{name_of(operands[0])}.size({operands[1]})"
    parts = [text(operand, name_of) for operand in operands]
    if name in _BOTH:
        return f"{name}({', '.join(parts)})"
    nested = [
        f"({part})" if isinstance(operand, tuple) and not _is_size(operand) else part
        for part, operand in zip(parts, operands, strict=True)
    ]
    return f"not {nested[0]}" if name == "not" else f" {name} ".join(nested)


# --- written by torch ---


def parse(code: str) -> Condition:
    """A condition that a tracer of torch wrote as Python.

    An input is spelled ``s[3]`` or ``L['tensors'][3]``, its size ``[1]``, ``.size(1)`` or
    ``.size()[1]`` of that.

    Raises:
        UnsupportedError: it has no form here.
    """
    try:
        found: Condition = _parsed(ast.parse(code, mode="eval").body)
    except (SyntaxError, LookupError, ValueError, RecursionError) as error:
        raise UnsupportedError(f"a condition that cannot be checked: {code[:200]}") from error
    return found


def _parsed(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _parsed(node.operand)
        return -value if isinstance(value, int) else ("-", 0, value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ("not", _parsed(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_parsed(node.left), _parsed(node.right))
    if isinstance(node, ast.BinOp):
        return (_SPELLED[type(node.op)], _parsed(node.left), _parsed(node.right))
    if isinstance(node, ast.BoolOp):
        return (_SPELLED[type(node.op)], *map(_parsed, node.values))
    if isinstance(node, ast.Compare):
        sides = list(map(_parsed, (node.left, *node.comparators)))
        links = [
            (_SPELLED[type(link)], *sides[place : place + 2]) for place, link in enumerate(node.ops)
        ]
        return links[0] if len(links) == 1 else ("and", *links)
    if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in _EXTREMES:
        return (_EXTREMES[name], *map(_parsed, node.args))
    return _size(node)


def _power(base: Any, exponent: Any) -> Any:
    if type(exponent) is not int or not 1 <= exponent <= _MAX_POWER:
        raise ValueError(exponent)
    return base if exponent == 1 else ("*", base, _power(base, exponent - 1))


def _size(node: ast.AST) -> Condition:
    """A size as any of torch's printers spells it."""
    match node:
        case (
            ast.Subscript(ast.Call(ast.Attribute(value, "size"), []), ast.Constant(dim))
            | ast.Call(ast.Attribute(value, "size"), [ast.Constant(dim)])
            | ast.Subscript(value, ast.Constant(dim))
        ) if type(dim) is int:
            pass
        case _:
            raise ValueError(ast.unparse(node))
    match value:
        case ast.Subscript(ast.Name() | ast.Subscript(), ast.Constant(number)) if (
            type(number) is int
        ):
            return size_of(number, dim)
    raise ValueError(ast.unparse(node))


# --- read from files, or made elsewhere ---


def check(conditions: Any, inputs: int) -> tuple[Condition, ...]:
    """``conditions`` on so many inputs, each once, with tuples for lists.

    Raises:
        UnsupportedError: they are no such conditions.
    """
    if not isinstance(conditions, list | tuple) or len(conditions) > _MAX_CONDITIONS:
        raise UnsupportedError("its conditions on sizes are no list")
    for condition in conditions:
        if not isinstance(condition, list | tuple):
            raise UnsupportedError("a condition on sizes is no list")
    return tuple(dict.fromkeys(_checked(condition, inputs, 0) for condition in conditions))


def _checked(expression: Any, inputs: int, depth: int) -> Any:
    if type(expression) is int and expression.bit_length() <= _MAX_BITS:
        return expression
    is_list = isinstance(expression, list | tuple)
    if depth >= _MAX_DEPTH or not is_list or len(expression) < 2:
        raise UnsupportedError(f"a condition on sizes is not valid: {str(expression)[:80]}")
    name, *operands = expression
    if name == "size":
        if len(operands) != 2 or not all(type(x) is int and x >= 0 for x in operands):
            raise UnsupportedError(f"a condition names no size: {str(expression)[:80]}")
        if operands[0] >= inputs:
            raise UnsupportedError(f"a condition is on input {operands[0]}, and there are {inputs}")
        return size_of(*operands)
    if not isinstance(name, str) or name not in _OPERATORS:
        raise UnsupportedError(f"a condition has the unknown operator {str(name)[:80]!r}")
    if name not in _LOOSE and len(operands) != (1 if name == "not" else 2):
        raise UnsupportedError(f"the operator {name!r} of a condition has {len(operands)} operands")
    return (name, *(_checked(operand, inputs, depth + 1) for operand in operands))
