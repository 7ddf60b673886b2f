"""Which values are written straight into the concatenation that wants them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from x86quant.lowering.graph_tools import is_op


@dataclasses.dataclass(frozen=True)
class Placement:
    """A node's result is ``cat.narrow(dim, start, size)``."""

    cat: Node
    dim: int
    start: int
    size: int


def place_cats(graph: Graph, shapes: Mapping[Node, Any]) -> dict[Node, Placement]:
    """The placement of every node that can have one.

    An input of a concatenation is placed when an op of the segment makes it, its qparams are
    those of the result, and no earlier concatenation has it already.
    """
    placements: dict[Node, Placement] = {}
    for cat in graph.nodes:
        if cat.op != "call_function" or not is_op(cat, "cat"):
            continue
        kwargs: Any = cat.kwargs
        dim = kwargs["dim"] % len(shapes[cat])
        start = 0
        for x, *qparams in zip(kwargs["xs"], kwargs["x_scales"], kwargs["x_zps"], strict=True):
            size = shapes[x][dim]
            same = qparams == [kwargs["out_scale"], kwargs["out_zp"]]
            once = kwargs["xs"].count(x) == 1
            if same and once and is_op(x) and x not in placements:
                placements[x] = Placement(cat, dim, start, size)
            start += size
    return placements
