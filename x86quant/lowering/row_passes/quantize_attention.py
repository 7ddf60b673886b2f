"""An attention whose heads are joined and quantized for the next product quantizes them itself."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from x86quant.lowering.graph_tools import finish, is_op, nodes_of, sole_user
from x86quant.lowering.row_passes._values import emit_many, quantizer_of, take_over, value_of

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of attentions."""
    changed = 0
    for attention in nodes_of(gm, "attention"):
        joined = sole_user(attention)
        if joined is None or joined.target is not aten.reshape.default:
            continue
        heads, rows = value_of(attention), value_of(joined)
        quantizer = quantizer_of(joined)
        if quantizer is None or len(joined.users) != 1 or heads is None or rows is None:
            continue
        wanted = [*heads.shape[:2], heads.shape[2] * heads.shape[3]]
        if [str(size) for size in rows.shape] != [str(size) for size in wanted]:
            continue
        with gm.graph.inserting_before(attention):
            _, *results = emit_many(
                gm.graph, "attention_rows", attention, (None, None, None), **attention.kwargs
            )
        take_over(gm, quantizer, dict(enumerate(results)))
        gm.graph.erase_node(joined)
        gm.graph.erase_node(attention)
        changed += 1
    assert not any(is_op(n, "attention") and not n.users for n in gm.graph.nodes)
    return finish(gm, changed)
