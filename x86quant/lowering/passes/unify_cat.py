"""Producers of a concatenation yield its qparams at once, so that it only copies.

Then a planner may let them write in place. A producer that others read too is left alone: the
concatenation requantizes its codes.
"""

from __future__ import annotations

from typing import cast

from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    absorb,
    finish,
    nodes_of,
    qparams_of,
    set_output,
    sole_user,
)
from x86quant.lowering.passes.fuse_requantize import is_requantizable, refresh_input_qparams


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of producers changed."""
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
