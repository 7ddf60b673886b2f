"""``activation(gate) * up``, which alone reads two products of the same rows and is quantized."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish, is_op, nodes_of
from x86quant.lowering.row_passes._values import emit_many, is_alone, same_sizes, take_over

aten = torch.ops.aten
_ROWS = ("codes", "scale", "zero_point")


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of gates fused."""
    changed = 0
    for quantizer in nodes_of(gm, "quantize_rows"):
        product = quantizer.kwargs["x"]
        if not isinstance(product, Node) or (pair := _gate_and_up(product)) is None:
            continue
        gate, up = pair
        with gm.graph.inserting_before(quantizer):
            _, *results = emit_many(
                gm.graph,
                "gated_rows_rows",
                gate,
                (None, None, None),
                **{name: gate.kwargs[name] for name in _ROWS},
                gate_weight=gate.kwargs["weight"],
                gate_scale=gate.kwargs["weight_scale"],
                gate_bias=gate.kwargs["bias"],
                up_weight=up.kwargs["weight"],
                up_scale=up.kwargs["weight_scale"],
                up_bias=up.kwargs["bias"],
                activation=gate.kwargs["activation"],
            )
        take_over(gm, quantizer, dict(enumerate(results)))
        changed += 1
    return finish(gm, changed)


def _gate_and_up(product: Node) -> tuple[Node, Node] | None:
    if product.target is not aten.mul.Tensor or len(product.users) != 1:
        return None
    a, b = product.args[:2]
    if not is_op(a, "linear_rows") or not is_op(b, "linear_rows"):
        return None
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    if a is b or not (is_alone(a) and is_alone(b) and same_sizes(a, b)):
        return None
    if any(a.kwargs[name] is not b.kwargs[name] for name in _ROWS):
        return None
    if (a.kwargs["activation"] is None) == (b.kwargs["activation"] is None):
        return None
    return (b, a) if a.kwargs["activation"] is None else (a, b)
