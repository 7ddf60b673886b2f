"""``softmax(q @ k.T * scale + mask) @ v`` becomes ``scaled_dot_product_attention``."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import finish
from x86quant.lowering.row_passes._values import (
    argument,
    call,
    is_alone,
    is_float32,
    same_sizes,
    sizes,
    value_of,
)

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of attentions recognised."""
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.matmul.default:
            continue
        found = _attention(node)
        if found is None:
            continue
        q, k, v, mask, scale = found
        with gm.graph.inserting_before(node):
            whole = call(
                gm.graph,
                aten.scaled_dot_product_attention.default,
                value_of(node),
                q,
                k,
                v,
                mask,
                scale=scale,
            )
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _attention(node: Node) -> tuple[Node, Node, Node, Node | None, float] | None:
    """Queries, keys, values, an additive mask and the scale of what ``node`` computes."""
    softmax, v = node.args[:2]
    if not isinstance(softmax, Node) or softmax.target is not aten.softmax.int:
        return None
    rank = len(sizes(softmax) or ())
    if rank != 4 or argument(softmax, 1, "dim") not in (-1, 3) or not is_alone(softmax):
        return None
    if argument(softmax, 2, "dtype") not in (None, torch.float32):
        return None
    scores = softmax.args[0]
    if not isinstance(scores, Node) or not is_alone(scores) or not is_float32(scores, softmax, v):
        return None
    mask: Node | None = None
    if scores.target is aten.add.Tensor and not scores.kwargs:
        one, other = scores.args[:2]
        for scaled, added in ((one, other), (other, one)):
            if isinstance(scaled, Node) and _product(scaled) and isinstance(added, Node):
                if not same_sizes(scaled, scores) or not is_float32(added) or not is_alone(scaled):
                    return None
                scores, mask = scaled, added
                break
        else:
            return None
    found = _product(scores)
    if found is None or not isinstance(v, Node):
        return None
    q, k, scale = found
    return q, k, v, mask, scale


def _product(node: Node) -> tuple[Node, Node, float] | None:
    """Queries, keys and scale of ``q @ k.T * scale``."""
    scale = 1.0
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        source, number = node.args[:2]
        if type(number) not in (int, float) or not number or not isinstance(source, Node):
            return None
        if node.kwargs or not is_alone(source):
            return None
        scale = float(number) if node.target is aten.mul.Tensor else 1 / float(number)  # type: ignore[arg-type]
        node = source
    if node.target is not aten.matmul.default:
        return None
    q, turned = node.args[:2]
    if not isinstance(q, Node) or not isinstance(turned, Node):
        return None
    if turned.target is not aten.transpose.int or len(sizes(turned) or ()) != 4:
        return None
    if {int(d) % 4 for d in turned.args[1:3]} != {2, 3}:  # type: ignore[arg-type]
        return None
    k = turned.args[0]
    if not isinstance(k, Node):
        return None
    if q.target is aten.mul.Tensor and is_alone(q) and not q.kwargs and is_float32(q):
        source, number = q.args
        if type(number) in (int, float) and isinstance(source, Node) and same_sizes(source, q):
            return source, k, scale * float(number)  # type: ignore[arg-type]
    return q, k, scale
