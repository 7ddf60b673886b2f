"""Arithmetic of sizes: what a file computes of shapes, number by number.

A file computes the arguments of Reshape and its like as tensors of integers. Followed number by
number they become ``x.size(0)`` and constants, so that a graph holds for every batch.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

#: A number that is known, or a node that computes it.
Number = int | Node


@dataclasses.dataclass(frozen=True)
class Extents:
    """A tensor of int64 of one dimension, or with ``scalar`` of none, that is followed."""

    items: tuple[Number, ...]
    scalar: bool = False

    @property
    def constant(self) -> torch.Tensor | None:
        """The tensor, if all of it is known."""
        if any(isinstance(item, Node) for item in self.items):
            return None
        return torch.tensor(self.items[0] if self.scalar else self.items, dtype=torch.int64)


def followed(value: Any) -> Extents | None:
    """``value``, a constant or sizes already, as sizes."""
    if isinstance(value, Extents):
        return value
    if not isinstance(value, torch.Tensor) or value.dim() > 1 or value.numel() > 64:
        return None
    if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        return None
    return Extents(tuple(int(v) for v in value.reshape(-1).tolist()), value.dim() == 0)


def _whole_quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_ARITHMETIC: dict[str, tuple[Callable[[int, int], int], Any]] = {
    "Add": (operator.add, operator.add),
    "Sub": (operator.sub, operator.sub),
    "Mul": (operator.mul, operator.mul),
    "Div": (_whole_quotient, operator.floordiv),
    "Mod": (operator.mod, operator.mod),
}

#: Makes a node of a function of numbers.
Emit = Callable[[Any, tuple[Number, ...]], Node]


def size_arithmetic(
    op_type: str, inputs: list[Any], attributes: dict[str, Any], emit: Emit
) -> Extents | None:
    """The result of an operator on sizes; None if it is none that can be followed."""
    if not any(isinstance(value, Extents) for value in inputs):
        return None
    first = followed(inputs[0])
    if op_type in _ARITHMETIC and len(inputs) == 2:
        second = followed(inputs[1])
        if first is None or second is None:
            return None
        return _elementwise(op_type, first, second, emit)
    if op_type in ("Identity", "Cast"):
        return first if attributes.get("to", 7) in (6, 7) else None
    if op_type == "Concat":
        parts = [followed(value) for value in inputs]
        if any(part is None or part.scalar for part in parts):
            return None
        return Extents(tuple(item for part in parts if part is not None for item in part.items))
    if op_type == "Where":
        return _where(inputs)
    if first is None:
        return None
    if op_type == "Gather":
        return _gathered(first, inputs[1])
    if op_type == "Slice":
        return _sliced(first, inputs, attributes)
    if op_type in ("Unsqueeze", "Squeeze", "Reshape"):
        return _in_other_rank(op_type, first, inputs)
    if op_type in ("ReduceProd", "ReduceSum") and not first.scalar:
        return _reduced(op_type, first, attributes, emit)
    return None


def _together(*lists: Sequence[Any]) -> list[tuple[Any, ...]] | None:
    """Their elements side by side, one alone repeated; None if their lengths differ otherwise."""
    length = max(map(len, lists))
    if not {*map(len, lists)} <= {1, length}:
        return None
    return list(zip(*(list(x) * length if len(x) == 1 else x for x in lists), strict=True))


def _elementwise(op_type: str, a: Extents, b: Extents, emit: Emit) -> Extents | None:
    exact, traced = _ARITHMETIC[op_type]
    pairs = _together(a.items, b.items)
    if pairs is None:
        return None
    found: list[Number] = []
    for x, y in pairs:
        if isinstance(x, int) and isinstance(y, int):
            if y == 0 and op_type in ("Div", "Mod"):
                return None
            found.append(exact(x, y))
        elif op_type in ("Div", "Mod") and isinstance(y, int) and y <= 0:
            return None  # rounded otherwise than Python does
        else:
            found.append(_simple(op_type, x, y) or emit(traced, (x, y)))
    return Extents(tuple(found), a.scalar and b.scalar)


def _simple(op_type: str, x: Number, y: Number) -> Node | None:
    """What needs no arithmetic: times one, plus zero."""
    neutral = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}.get(op_type)
    if isinstance(y, int) and y == neutral and isinstance(x, Node):
        return x
    if isinstance(x, int) and x == neutral and op_type in ("Add", "Mul") and isinstance(y, Node):
        return y
    return None


def _where(inputs: list[Any]) -> Extents | None:
    condition, x, y = inputs[0], followed(inputs[1]), followed(inputs[2])
    if not isinstance(condition, torch.Tensor) or x is None or y is None:
        return None
    rows = _together(condition.reshape(-1).tolist(), x.items, y.items)
    if rows is None:
        return None
    items = tuple(a if c else b for c, a, b in rows)
    return Extents(items, condition.dim() == 0 and x.scalar and y.scalar)


def compared(inputs: list[Any]) -> torch.Tensor | None:
    """``Equal`` of sizes with numbers, where that is known: no size is negative."""
    a, b = followed(inputs[0]), followed(inputs[1])
    if a is None or b is None or not any(isinstance(v, Extents) for v in inputs):
        return None
    pairs = _together(a.items, b.items)
    if pairs is None:
        return None
    found = []
    for x, y in pairs:
        if isinstance(x, int) and isinstance(y, int):
            found.append(x == y)
        elif x is y:
            found.append(True)
        elif any(
            _is_size(one) and isinstance(other, int) and other < 0
            for one, other in ((x, y), (y, x))
        ):
            found.append(False)
        else:
            return None
    return torch.tensor(found[0] if a.scalar and b.scalar else found, dtype=torch.bool)


def _is_size(item: Number) -> bool:
    return isinstance(item, Node) and item.op == "call_method" and item.target == "size"


def _gathered(sizes: Extents, index: Any) -> Extents | None:
    if not isinstance(index, torch.Tensor) or index.dim() > 1 or sizes.scalar:
        return None
    wanted = index.reshape(-1).tolist()
    if any(not -len(sizes.items) <= n < len(sizes.items) for n in wanted):
        return None
    return Extents(tuple(sizes.items[n] for n in wanted), index.dim() == 0)


def _sliced(sizes: Extents, inputs: list[Any], attributes: dict[str, Any]) -> Extents | None:
    if len(inputs) == 1:
        bounds = [attributes["starts"], attributes["ends"], [0], [1]]
    else:
        bounds = []
        for value in (*inputs[1:], *[None] * (5 - len(inputs))):
            if value is None:
                bounds.append([0] if len(bounds) == 2 else [1])
            elif not isinstance(value, torch.Tensor):
                return None
            else:
                bounds.append(value.reshape(-1).tolist())
    if sizes.scalar or any(len(bound) != 1 for bound in bounds):
        return None
    begin, end, step = bounds[0][0], bounds[1][0], bounds[3][0]
    if step < 0 and end < -len(sizes.items):
        end = None
    return Extents(sizes.items[begin:end:step])


def _in_other_rank(op_type: str, sizes: Extents, inputs: list[Any]) -> Extents | None:
    if op_type == "Unsqueeze":
        return Extents(sizes.items) if sizes.scalar else None
    if op_type == "Squeeze":
        return Extents(sizes.items, True) if len(sizes.items) == 1 else None
    wanted = inputs[1]
    if not isinstance(wanted, torch.Tensor) or wanted.dim() != 1:
        return None
    if wanted.numel() == 0 and len(sizes.items) == 1:
        return Extents(sizes.items, True)
    if wanted.tolist() in ([-1], [len(sizes.items)]):
        return Extents(sizes.items)
    return None


def _reduced(op_type: str, sizes: Extents, attributes: dict[str, Any], emit: Emit) -> Extents:
    name = "Mul" if op_type == "ReduceProd" else "Add"
    total = Extents((1 if name == "Mul" else 0,), True)
    for item in sizes.items:
        found = _elementwise(name, total, Extents((item,), True), emit)
        assert found is not None
        total = found
    return Extents(total.items, not attributes.get("keepdims", 1))
