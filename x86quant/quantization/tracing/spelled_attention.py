"""Attention that code spells out, as the function that stands for all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import plain_name, sole_user
from x86quant.quantization.tracing.seen_values import seen_values

_PRODUCTS = frozenset(["matmul", "bmm"])
_FACTORS = {"mul": 1, "div": -1, "truediv": -1}


def spell_attention(gm: GraphModule, inputs: Callable[[], Sequence[torch.Tensor]]) -> int:
    """``softmax(q @ k.T * scale + mask) @ v`` becomes ``scaled_dot_product_attention``.

    It would have codes after each of its steps otherwise. ``inputs`` are what ``gm`` is seen on.
    Returns the number of attentions. Not yet recompiled.
    """
    known = [found for node in gm.graph.nodes if (found := _attention(gm, node)) is not None]
    masks = {mask for _, _, _, mask, _ in known} - {None}
    seen = seen_values(gm, inputs(), masks) if masks else {}
    changed = 0
    for node in list(gm.graph.nodes) if known else ():
        found = _attention(gm, node)  # what it takes may be an attention that was replaced
        if found is None:
            continue
        q, turned, v, mask, scale = found
        if mask is not None and (mask not in seen or seen[mask].dtype is not torch.float32):
            continue  # added, not what the function takes a mask of bools for
        with gm.graph.inserting_before(node):
            k = gm.graph.call_method("transpose", (turned, -2, -1))
            whole = gm.graph.call_function(
                F.scaled_dot_product_attention, (q, k, v), {"attn_mask": mask, "scale": scale}
            )
        for new in (k, whole):
            new.meta.update(node.meta)
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)
        changed += 1
    gm.graph.eliminate_dead_code()
    return changed


def _attention(gm: GraphModule, node: Node) -> tuple[Node, Node, Node, Any, float] | None:
    """Queries, keys as they are multiplied with, values, a mask and the scale, if it is one."""
    shares, v = _product(node) or (None, None)
    scores = None if shares is None or sole_user(shares) is not node else _softmax(gm, shares)
    if scores is None or sole_user(scores) is None or v is None:
        return None
    found = _scaled(scores)
    if found is not None:
        return found[0], found[1], v, None, found[2]
    if _name(scores) != "add" or len(scores.args) != 2 or scores.kwargs:
        return None
    for part, mask in (scores.args, scores.args[::-1]):
        if isinstance(part, Node) and sole_user(part) is scores and isinstance(mask, Node):
            found = _scaled(part)
            if found is not None:
                return found[0], found[1], v, mask, found[2]
    return None


def _scaled(node: Node) -> tuple[Node, Node, float] | None:
    """Both sides of a product, and what it is multiplied by."""
    scale = 1.0
    while _name(node) in _FACTORS and len(node.args) == 2 and not node.kwargs:
        source, factor = node.args
        if not isinstance(source, Node) and _name(node) == "mul":
            source, factor = factor, source
        if type(factor) not in (int, float) or not factor or not isinstance(source, Node):
            return None
        if sole_user(source) is not node:
            return None
        scale *= float(factor) ** _FACTORS[_name(node)]  # type: ignore[arg-type]
        node = source
    sides = _product(node)
    return None if sides is None else (*sides, scale)


def _name(node: Node) -> str:
    return plain_name(node) if node.op in ("call_function", "call_method") else ""


def _product(node: Node) -> tuple[Node, Node] | None:
    if _name(node) not in _PRODUCTS or len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    return (a, b) if isinstance(a, Node) and isinstance(b, Node) else None


def _softmax(gm: GraphModule, node: Node) -> Node | None:
    """What ``node`` is the softmax of, over the last dimension."""
    source: Any
    dims: list[Any]
    if node.op == "call_module":
        layer = gm.get_submodule(str(node.target))
        if type(layer) is not nn.Softmax or len(node.args) != 1:
            return None
        source, dims = node.args[0], [layer.dim]
    elif _name(node) == "softmax":
        source, *dims = *node.args, *node.kwargs.values()
        if set(node.kwargs) - {"dim", "input"} or "input" in node.kwargs:
            return None
    else:
        return None
    return source if dims == [-1] and isinstance(source, Node) else None
