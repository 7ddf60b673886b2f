"""Concatenations that start with what an earlier one has take that one: its codes move no more.

A dense block concatenates everything so far before each of its layers. As ``cat(cat(a, b), c)``
each result lies in place within the next, where ``cat(a, b, c)`` beside ``cat(a, b)`` copies.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish, nodes_of

#: What a concatenation joins: dimension, qparams, and its inputs.
_Key = tuple[Any, ...]


def run(gm: GraphModule) -> int:
    """Nest every concatenation of codes of one scale that can be; returns how many were."""
    changed = 0
    seen: dict[_Key, Node] = {}
    for node in filter(_one_scale, nodes_of(gm, "cat")):
        kwargs: Any = node.kwargs
        xs = list(kwargs["xs"])
        alike = (kwargs["dim"], kwargs["out_scale"], kwargs["out_zp"])
        for length in range(len(xs) - 1, 0, -1):
            start = seen.get((*alike, *xs[:length]))
            if start is not None:
                _replace_start(node, start, length)
                changed += 1
                break
        seen.setdefault((*alike, *xs), node)
    return finish(gm, changed)


def _one_scale(cat: Node) -> bool:
    kwargs: Any = cat.kwargs
    return set(kwargs["x_scales"]) == {kwargs["out_scale"]} and set(kwargs["x_zps"]) == {
        kwargs["out_zp"]
    }


def _replace_start(cat: Node, start: Node, length: int) -> None:
    kwargs: Any = cat.kwargs
    cat.kwargs = {
        **kwargs,
        "xs": [start, *kwargs["xs"][length:]],
        "x_scales": kwargs["x_scales"][length - 1 :],
        "x_zps": kwargs["x_zps"][length - 1 :],
    }
