"""Concatenations, on codes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    absorb,
    dequantized,
    finish,
    nodes_of,
    qparams_of,
    set_output,
    sole_user,
    why,
)
from x86quant.lowering.passes._epilogue import Lowered, lower
from x86quant.lowering.passes.epilogues import is_requantizable, refresh_input_qparams


def lower_cat(gm: GraphModule) -> int:
    """Concatenation of quantized tensors becomes ``x86quant.cat``.

    Returns the number of concatenations lowered.
    """
    return lower(gm, torch.ops.aten.cat.default, _cat_rule, clamps=False)


def _cat_rule(gm: GraphModule, node: Node) -> Lowered:
    codes = [dequantized(value) for value in node.args[0]]  # type: ignore[union-attr]
    known = [value for value in codes if value is not None]
    if len(known) < len(codes):
        why(node, "one of its inputs is not quantized")
        return None
    qparams = [qparams_of(value) for value in known]
    return "cat", {
        "xs": known,
        "dim": node.args[1],
        "x_scales": [q.scale for q in qparams],
        "x_zps": [q.zero_point for q in qparams],
    }


def unify_cat(gm: GraphModule) -> int:
    """Producers of a concatenation yield its qparams at once, so that it only copies.

    Then a planner may let them write in place. A producer that others read too is left alone: the
    concatenation requantizes its codes.

    Returns the number of producers changed.
    """
    changed = sum(_unify(node) for node in nodes_of(gm, "cat"))
    return finish(gm, changed)


def _unify(cat: Node) -> int:
    out, changed = qparams_of(cat), 0
    inputs = cast(list[Node], cat.kwargs["xs"])
    for producer in inputs:
        if qparams_of(producer) == out or sole_user(producer) is not cat:
            continue
        if is_requantizable(producer):
            absorb(producer, producer)
            set_output(producer, out)
            changed += 1
    refresh_input_qparams(cat)
    return changed


#: What a concatenation joins: dimension, qparams, and its inputs.
_Key = tuple[Any, ...]


def nest_cats(gm: GraphModule) -> int:
    """Concatenations that start with what an earlier one has take that one: its codes move no more.

    A dense block concatenates everything so far before each of its layers. As ``cat(cat(a, b), c)``
    each result lies in place within the next, where ``cat(a, b, c)`` beside ``cat(a, b)`` copies.

    Returns how many were.
    """
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
