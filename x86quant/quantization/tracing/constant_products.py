"""Products with constant matrices, spelled as linears: ``x @ weight`` has an int8 form as such."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, constant, plain_name

aten = torch.ops.aten
_PRODUCTS = (torch.matmul, operator.matmul, torch.mm, aten.matmul.default, aten.mm.default)
_SUMS = (torch.addmm, aten.addmm.default)
#: What turns a matrix, by name.
_TURNS = frozenset(["t", "T", "mT", "adjoint", "numpy_T", "transpose", "swapaxes", "permute"])


def spell_as_linears(gm: GraphModule) -> None:
    """Let products of ``gm`` with constant matrices be linears; not yet recompiled."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.kwargs:
            continue
        if node.target in _PRODUCTS and len(node.args) == 2:
            x, weight = node.args
            bias = None
        elif node.target in _SUMS and len(node.args) == 3:
            bias, x, weight = node.args
        else:
            continue
        if not isinstance(x, Node) or _constant(gm, x) is not None:
            continue
        matrix = _constant(gm, weight)
        if matrix is None or matrix.dim() != 2 or matrix.dtype is not torch.float32:
            continue
        if bias is not None and ((b := _constant(gm, bias)) is None or b.dim() != 1):
            continue
        with gm.graph.inserting_before(node):
            turned = add_constant(gm, gm.graph, f"{node.name}_weight", matrix.t().contiguous())
        node.target = F.linear
        node.args = (x, turned) if bias is None else (x, turned, bias)
    gm.graph.eliminate_dead_code()


def _constant(gm: GraphModule, node: Any) -> torch.Tensor | None:
    """The tensor that ``node`` is at every call, if it is an attribute, turned or not."""
    if not isinstance(node, Node):
        return None
    if node.op == "get_attr":
        return constant(gm, node)
    if not node.op.startswith("call_") or not node.args or _name(node) not in _TURNS:
        return None
    source = _constant(gm, node.args[0])
    if source is None or any(isinstance(x, Node) for x in node.all_input_nodes[1:]):
        return None
    args = node.args[1:]
    if node.target is getattr:
        found = getattr(source, str(args[0]))
    elif node.op == "call_method":
        found = getattr(source, str(node.target))(*args, **node.kwargs)
    else:
        found = node.target(source, *args, **node.kwargs)  # type: ignore[operator]
    return found if isinstance(found, torch.Tensor) else None


def _name(node: Node) -> str:
    """What ``node`` calls, or the attribute that it reads."""
    if node.target is getattr:
        return str(node.args[1])
    return plain_name(node)
