"""A float linear by a weight that is computed from int8 codes becomes the int8 one.

So it looks in a graph where a module gives its layer's weight to ``F.linear``, as torchvision's
Swin does with those of its attention.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import constant, emit, finish
from x86quant.lowering.row_passes._values import argument, is_float32, value_of

aten = torch.ops.aten

# x[:, None] in the ways that export spells it.
_COLUMN = (aten.unsqueeze.default, aten.reshape.default, aten.view.default)


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of linears."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.linear.default or not is_float32(node, node.args[0]):
            continue
        found = _codes(gm, node.args[1])
        if found is None:
            continue
        weight, scale = found
        bias = argument(node, 2, "bias")
        with gm.graph.inserting_before(node):
            product = emit(
                gm.graph, "linear_dynamic", node, x=node.args[0], weight=weight,
                weight_scale=scale, bias=bias,
            )  # fmt: skip
        product.meta["val"] = value_of(node)
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _codes(gm: GraphModule, weight: object) -> tuple[Node, Node] | None:
    """Codes [N, K] and scales [N] whose product ``weight`` is."""
    if not isinstance(weight, Node) or weight.target is not aten.mul.Tensor:
        return None
    codes, column = weight.args
    if not isinstance(column, Node) or column.target not in _COLUMN:
        return None
    scale = column.args[0]
    values, scales = constant(gm, codes), constant(gm, scale)
    if values is None or scales is None or values.dtype != torch.int8 or values.dim() != 2:
        return None
    seen = value_of(column)
    if scales.shape != values.shape[:1] or scales.dtype != torch.float32:
        return None
    if seen is None or seen.shape != (len(values), 1):
        return None
    assert isinstance(codes, Node)
    assert isinstance(scale, Node)
    return codes, scale
