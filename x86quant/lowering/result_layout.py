"""How the results of a graph lie in memory.

Codes lie channels last, and the float model's own results mostly do not. Who gets a result may
look at it with ``view``, which only some layouts allow, and may write to what ``contiguous`` gives,
which is a copy in one layout and the result itself in the other.
"""

from __future__ import annotations

from torch.fx import Graph, Node

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
