"""An ``einsum`` that multiplies matrices becomes ``matmul``, as attention is known by."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from x86quant.lowering.graph_tools import finish
from x86quant.lowering.row_passes._values import call, is_float32, value_of

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of einsums."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.einsum.default or len(node.args) != 2 or node.kwargs:
            continue
        equation, operands = node.args
        turned = _second_is_turned(str(equation))
        a, b = operands if len(operands) == 2 else (None, None)
        if turned is None or not is_float32(node, a, b):
            continue
        of_b = value_of(b)
        assert of_b is not None
        with gm.graph.inserting_before(node):
            if turned:
                right: Any = call(
                    gm.graph, aten.transpose.int, of_b.transpose(-1, -2), b, of_b.dim() - 2,
                    of_b.dim() - 1,
                )  # fmt: skip
            else:
                right = b
            product = call(gm.graph, aten.matmul.default, value_of(node), a, right)
        product.meta = {**node.meta}
        node.replace_all_uses_with(product)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _second_is_turned(equation: str) -> bool | None:
    """Of an equation of matrices, whether the second is transposed; None if it is another one."""
    given, _, out = equation.replace(" ", "").partition("->")
    a, comma, b = given.partition(",")
    names = f"{a}{b}{out}"
    if not comma or not names.isalpha() or min(map(len, (a, b, out))) < 3:
        return None
    if any(len(set(part)) != len(part) for part in (a, b, out)) or a[:-2] != b[:-2]:
        return None
    row, inner, first, second = a[-2], a[-1], b[-2], b[-1]
    if row in b or out[:-2] != a[:-2]:
        return None
    if second == inner and out[-2:] == row + first:
        return True
    return False if first == inner and out[-2:] == row + second else None
