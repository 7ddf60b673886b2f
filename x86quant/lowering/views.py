"""Which calls move codes and never compute with them: the words that passes and planner share."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Graph, Node

aten = torch.ops.aten

#: Look at the same memory in another shape, or at a part of it. Those that reshape copy where no
#: view can say it, in the order of the elements.
_RESHAPES = frozenset({"flatten", "reshape", "unflatten", "view"})
#: Of several parts, a tuple.
_PARTS = frozenset({"chunk", "split", "split_with_sizes", "unbind"})
_VIEWS = _RESHAPES | _PARTS | {
    "movedim", "narrow", "permute", "select", "squeeze", "swapaxes", "swapdims", "t", "transpose",
    "unsqueeze",
}  # fmt: skip
#: Repeat codes, or put them in another order.
_COPIES = frozenset({"expand", "flip", "repeat", "roll"})

_ATEN_RESHAPES = frozenset(
    {aten.flatten.using_ints, aten.reshape.default, aten.unflatten.int, aten.view.default}
)
_ATEN_PARTS = frozenset(
    {aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
)
_ATEN_VIEWS = (_ATEN_RESHAPES | _ATEN_PARTS) | {
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.unsqueeze.default,
}


def _functions(names: frozenset[str]) -> frozenset[Any]:
    return frozenset(getattr(torch, name) for name in names if hasattr(torch, name))


_RESHAPING = _functions(_RESHAPES) | _ATEN_RESHAPES
_VIEWING = _functions(_VIEWS) | _ATEN_VIEWS
_PARTING = _functions(_PARTS) | _ATEN_PARTS
_MOVING = _VIEWING | _functions(_COPIES) | {operator.getitem, F.pixel_shuffle, F.pixel_unshuffle}
_ROLLING = (torch.roll, aten.roll.default)


def is_view(node: Node) -> bool:
    """Whether ``node`` only looks at its input in another shape, or at a part of it."""
    if node.op == "call_method":
        return str(node.target) in _VIEWS
    if node.target is operator.getitem:
        return _is_basic(node.args[1])
    return node.target in _VIEWING


def parts(node: Node) -> bool:
    """Whether ``node`` gives several tensors that are parts of its input."""
    if node.op == "call_method":
        return str(node.target) in _PARTS
    return node.target in _PARTING


def is_reshape(node: Node) -> bool:
    """Whether ``node`` is a view that may copy, and then keeps the order of the elements."""
    if node.op == "call_method":
        return str(node.target) in _RESHAPES
    return node.target in _RESHAPING


def is_roll(node: Node) -> bool:
    """Whether ``node`` rolls dimensions of its input, none of which is the first: each image."""
    dims: Any = node.args[2] if node.target in _ROLLING and len(node.args) == 3 else ()
    named = dims if isinstance(dims, list | tuple) else [dims]
    return len(named) > 0 and all(type(dim) is int and dim > 0 for dim in named)


def moves_codes(node: Node) -> bool:
    """Whether each element of the result of ``node`` is one of its input's, unchanged."""
    if node.op == "call_method":
        return str(node.target) in _VIEWS | _COPIES
    return node.op == "call_function" and node.target in _MOVING


def _is_basic(index: Any) -> bool:
    """Whether an index takes a view: numbers and slices do, tensors and lists take a copy."""
    if isinstance(index, tuple):
        return all(map(_is_basic, index))
    if isinstance(index, slice):
        return True
    if isinstance(index, Node):
        return computes_a_size(index)
    return index is None or index is Ellipsis or type(index) is int


#: Methods that ask about a tensor's shape.
_QUESTIONS = frozenset({"size", "dim", "ndimension", "numel"})
#: Functions that make numbers of sizes.
ON_SIZES = frozenset(
    [
        *(operator.add, operator.floordiv, operator.mod, operator.mul, operator.sub, operator.neg),
        *(operator.truediv, math.ceil, math.floor),
    ]
)


def is_question(node: Node) -> bool:
    """Whether ``node`` asks for a tensor's shape, or for part of it."""
    if node.op == "call_method":
        return str(node.target) in _QUESTIONS
    return node.target is getattr and node.args[1] in ("shape", "ndim")


def computes_a_size(node: Node) -> bool:
    """Whether ``node`` yields sizes, or a number made from sizes and other numbers."""
    if is_question(node):
        return True
    if node.op != "call_function" or not node.args:
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and computes_a_size(node.args[0])
    return node.target in ON_SIZES and all(
        computes_a_size(argument) if isinstance(argument, Node) else True for argument in node.args
    )


def is_size_tuple(node: Node) -> bool:
    """Whether ``node`` yields several sizes of a tensor: its shape, or a slice of it."""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    if node.target is operator.getitem and isinstance(node.args[1], slice):
        return isinstance(node.args[0], Node) and is_size_tuple(node.args[0])
    return node.target is getattr and node.args[1] == "shape"


# --- how the results of a graph lie in memory ---
#
# Codes lie channels last, and the float model's own results mostly do not. Who gets a result may
# look at it with ``view``, which only some layouts allow, and may write to what ``contiguous``
# gives, which is a copy in one layout and the result itself in the other.

#: Values of so few dimensions lie in the order of their dimensions anyway.
_ORDERED_DIMENSIONS = 3


def laid_out(graph: Graph, value: Node, rank: int) -> Node:
    """``value``, a result of ``rank`` dimensions, which in the float model is contiguous."""
    if rank <= _ORDERED_DIMENSIONS or value.op == "placeholder":
        return value
    return graph.call_method("contiguous", (value,))


def lies_as_in_float(node: Node) -> bool:
    """Whether ``node`` only lays out a result."""
    return node.op == "call_method" and node.target == "contiguous" and not node.kwargs
