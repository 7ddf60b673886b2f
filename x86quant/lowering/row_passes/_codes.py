"""Letting an op that makes values quantize them itself."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from x86quant.lowering.row_passes._values import items


def quantizer_of(value: Node) -> Node | None:
    """The ``quantize_rows`` that reads ``value``, or None. There is one at most."""
    from x86quant.lowering.graph_tools import is_op

    return next((user for user in value.users if is_op(user, "quantize_rows")), None)


def take_over(gm: GraphModule, quantizer: Node, results: dict[int, Node]) -> None:
    """Let ``results`` stand for the codes, scales and zero points of ``quantizer``; it goes."""
    for number, item in items(quantizer).items():
        item.replace_all_uses_with(results[number])
        gm.graph.erase_node(item)
    gm.graph.erase_node(quantizer)
