"""A linear whose input PT2E quantizes by the range it has at run time becomes ``linear_dynamic``.

That quantizes each row by itself, which is never coarser than one range for all of them.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import constant, emit, finish, is_op, replace, why
from x86quant.lowering.passes._weights import scales_of

_PREFIX = "quantized_decomposed."


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of linears lowered."""
    changed = 0
    for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)):
        x, weight, bias = (*node.args, None)[:3]
        real = _quantized_at_run_time(x)
        if real is None:
            continue
        if not isinstance(weight, Node) or not is_op(weight, "dequantize_weight"):
            why(node, "its weight is not a constant int8 weight")
            continue
        if bias is not None and constant(gm, bias) is None:
            why(node, "its bias is not a constant")
            continue
        with gm.graph.inserting_before(node):
            new = emit(
                gm.graph,
                "linear_dynamic",
                node,
                x=real,
                weight=weight.kwargs["weight"],
                weight_scale=scales_of(gm, weight, 1),
                bias=bias,
            )
        replace(node, new)
        changed += 1
    return finish(gm, changed)


def _quantized_at_run_time(x: object) -> Node | None:
    """The float value behind ``x``, if its scale and zero point are computed from it."""
    if not _calls(x, "dequantize_per_tensor.tensor"):
        return None
    assert isinstance(x, Node)
    codes = x.args[0]
    if not _calls(codes, "quantize_per_tensor.tensor"):
        return None
    assert isinstance(codes, Node)
    found = codes.args[0]
    return found if isinstance(found, Node) and codes.args[1:3] == x.args[1:3] else None


def _calls(node: object, name: str) -> bool:
    # Its ops are there only when torchao is imported.
    return isinstance(node, Node) and str(node.target) == _PREFIX + name
