"""Rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import emit, finish
from x86quant.lowering.row_passes._values import argument, call, is_float32, sizes, value_of

aten = torch.ops.aten


def recognise_rotation(gm: GraphModule) -> int:
    """Rotary positions, spelled out as sums of products and halves of heads, become one op.

    Returns the number of rotations.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        found = _rotation(node)
        if found is None:
            continue
        x, cos, sin = found
        value = value_of(x)
        assert value is not None
        with gm.graph.inserting_before(node):
            tokens = call(gm.graph, aten.transpose.int, value.transpose(1, 2), x, 1, 2)
            out = emit(gm.graph, "rotate", node, x=tokens, cos=cos, sin=sin)
            out.meta["val"] = value.transpose(1, 2)
            back = call(gm.graph, aten.transpose.int, value, out, 1, 2)
        node.replace_all_uses_with(back)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _rotation(node: Node) -> tuple[Node, Node, Node] | None:
    """Heads [B, H, S, D], cosines and sines [B, S, D] whose rotation ``node`` is."""
    if node.target is not aten.add.Tensor or argument(node, 2, "alpha", 1) != 1:
        return None
    first, second = node.args[:2]
    for plain, turned in ((first, second), (second, first)):
        straight, halves = _times_angles(plain), _times_angles(turned)
        if straight is None or halves is None:
            continue
        x = straight[0]
        if _halves_of(halves[0]) is x and _are_heads(x, straight[1], halves[1], node):
            return x, straight[1], halves[1]
    return None


def _times_angles(node: Any) -> tuple[Node, Node] | None:
    """What is multiplied by angles that are the same for all heads, and those."""
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor:
        return None
    first, second = node.args[:2]
    for x, angles in ((first, second), (second, first)):
        if not isinstance(x, Node) or not isinstance(angles, Node):
            continue
        if angles.target is aten.unsqueeze.default and angles.args[1] in (1, -3):
            spread: Any = angles.args[0]
            return x, spread
    return None


def _halves_of(node: Node) -> Node | None:
    """What ``node`` is the halves of: the second one, negated, and then the first."""
    if node.target is not aten.cat.default or argument(node, 1, "dim", 0) not in (-1, 3):
        return None
    parts: Any = node.args[0]
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    second, first = _part(parts[0].args[0]), _part(parts[1])
    if second is None or first is None or second[0] is not first[0]:
        return None
    size = (sizes(first[0]) or ("",))[-1]
    if not size.isdigit() or int(size) % 2:
        return None
    whole, half = int(size), int(size) // 2
    return (
        first[0]
        if first[1:] == (0, half) and (second[1], min(second[2], whole)) == (half, whole)
        else None
    )


def _part(node: Any) -> tuple[Node, int, int] | None:
    """What ``node`` is a part of along the last dimension, from where to where."""
    if not isinstance(node, Node) or node.target is not aten.slice.Tensor:
        return None
    source, dim, start, end, step = (
        argument(node, i, name, default)
        for i, (name, default) in enumerate(
            (("self", None), ("dim", 0), ("start", None), ("end", None), ("step", 1))
        )
    )
    end = _ALL if end is None else end
    start = 0 if start is None else start
    if dim not in (-1, 3) or step != 1 or type(start) is not int or type(end) is not int:
        return None
    return source, start, end


_ALL = 2**63 - 1


def _are_heads(x: Node, cos: Node, sin: Node, out: Node) -> bool:
    of_x, of_cos, of_sin = sizes(x), sizes(cos), sizes(sin)
    if of_x is None or of_cos is None or of_sin is None or not is_float32(x, cos, sin, out):
        return False
    if len(of_x) != 4 or len(of_cos) != 3 or len(of_sin) != 3 or sizes(out) != of_x:
        return False
    wanted = (of_x[0], of_x[2], of_x[3])
    return all(
        angles[2] == wanted[2]
        and all(have in ("1", want) for have, want in zip(angles[:2], wanted, strict=False))
        for angles in (of_cos, of_sin)
    )
