"""A table moves into the op, or the table, whose result it alone reads."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    finish,
    is_op,
    nodes_of,
    qparams_of,
    replace,
    set_kwargs,
    sole_user,
    stand_for,
)
from x86quant.lowering.passes.fuse_clamp import CLAMPING


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of tables fused."""
    changed = 0
    for node in nodes_of(gm, "lut"):
        producer = node.kwargs["x"]
        assert isinstance(producer, Node)
        slot = "table" if is_op(producer, "lut") else "lut"
        if sole_user(producer) is not node or not is_op(producer, "lut", *CLAMPING):
            continue
        table = _composed(gm, producer.kwargs[slot], node.kwargs["table"])
        with gm.graph.inserting_before(producer):
            set_kwargs(
                producer, **{slot: add_constant(gm, gm.graph, f"{producer.name}_table", table)}
            )
        stand_for(producer, node)
        producer.meta["qparams"] = qparams_of(node)
        replace(node, producer)
        changed += 1
    return finish(gm, changed)


def _composed(gm: GraphModule, first: object, second: object) -> torch.Tensor:
    outer = constant(gm, second)
    assert outer is not None
    inner = constant(gm, first)
    return outer if inner is None else outer[inner.to(torch.int64)]
