"""A quantize behind what only moves reals also stands before it, so that the codes are moved.

PT2E quantizes where a layer reads, so that pools, concatenations and views before it are float, and
keep the layers before them from ending in int8. To round and then move gives what to move and then
round gives, bit by bit: rounding is monotonous, and codes are not rounded twice.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    dequantized,
    emit,
    finish,
    inherit,
    nodes_of,
    qparams_of,
    scale_and_zp,
)
from x86quant.lowering.passes.lower_pool import MAX_POOLS
from x86quant.lowering.views import is_view

aten = torch.ops.aten


def run(gm: GraphModule) -> int:
    """Apply the pass to ``gm``; returns the number of values quantized earlier."""
    hoisted: dict[Node, None] = {}
    changed = 0
    waiting = list(nodes_of(gm, "quantize"))
    while waiting:
        quantize = waiting.pop()
        for value in _moved(quantize.kwargs["x"]):
            earlier = _quantized(gm, value, quantize)
            if earlier is not None:
                waiting.append(earlier)
                hoisted[value] = None
                changed += 1
    changed += sum(_share(gm, value) for value in hoisted)
    return finish(gm, changed)


def _moved(mover: object) -> list[Node]:
    """What ``mover`` moves and only a quantize reads, where it is still float."""
    if not isinstance(mover, Node) or len(mover.users) > 1:
        return []
    if mover.target is aten.cat.default:
        values = mover.args[0]
    elif mover.target in MAX_POOLS or is_view(mover):
        values = mover.args[:1]
    else:
        return []
    assert isinstance(values, list | tuple)
    found = [x for x in values if isinstance(x, Node)]
    # A tensor from outside is quantized where the model does it: nothing is gained before that.
    is_open = all("shape" in x.meta and x.op == "call_function" for x in found)
    return [x for x in dict.fromkeys(found) if dequantized(x) is None] if is_open else []


def _quantized(gm: GraphModule, value: Node, quantize: Node) -> Node | None:
    """Let the one mover before ``quantize`` read ``value`` from codes like those it makes."""
    mover = quantize.kwargs["x"]
    assert isinstance(mover, Node)
    with gm.graph.inserting_after(value):
        codes = emit(gm.graph, "quantize", x=value, **scale_and_zp("out", quantize))
    inherit(codes, value)
    codes.meta["qparams"] = qparams_of(quantize)
    with gm.graph.inserting_after(codes):
        real = emit(gm.graph, "dequantize", x=codes, **scale_and_zp("x", quantize))
    inherit(real, value)
    mover.replace_input_with(value, real)
    return codes


def _share(gm: GraphModule, value: Node) -> int:
    """Where only quantizes read a float value, let those of narrow ranges read the widest's codes.

    A layer then ends in one of them. The others are rounded twice, by half a step of the widest.
    """
    users = list(value.users)
    if len(users) < 2 or not all(_quantizes(user, value) for user in users):
        return 0
    widest = max(users, key=lambda user: qparams_of(user).scale)
    others = [user for user in users if user is not widest]
    if not all(_within(user, widest) for user in others):
        return 0
    first = min(users, key=list(gm.graph.nodes).index)
    first.prepend(widest)
    with gm.graph.inserting_after(widest):
        real = emit(gm.graph, "dequantize", x=widest, **scale_and_zp("x", widest))
    inherit(real, value)
    for user in others:
        user.replace_input_with(value, real)
    return len(others)


def _quantizes(user: Node, value: Node) -> bool:
    return user.target is torch.ops.x86quant.quantize.default and user.kwargs["x"] is value


def _within(narrow: Node, wide: Node) -> bool:
    """Whether the codes of ``wide`` reach as far as those of ``narrow``, but for a step."""
    ranges = []
    for node in (narrow, wide):
        q = qparams_of(node)
        ranges.append(((0 - q.zero_point) * q.scale, (255 - q.zero_point) * q.scale))
    (low, high), (lowest, highest) = ranges
    step = qparams_of(wide).scale
    return lowest <= low + step and high - step <= highest
