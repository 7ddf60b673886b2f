"""Codes are moved in place of reals, and some moves go."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    dequantized,
    emit,
    finish,
    inherit,
    is_op,
    nodes_of,
    op_name,
    qparams_of,
    replace,
    scale_and_zp,
    why,
)
from x86quant.lowering.normalize import UNARY
from x86quant.lowering.passes.pools import MAX_POOLS
from x86quant.lowering.views import computes_a_size, is_question, is_view, moves_codes
from x86quant.ops.pool import PAD_MODES

aten = torch.ops.aten


def hoist_quantize(gm: GraphModule) -> int:
    """A quantize behind what only moves reals also stands before it, so that the codes are moved.

    PT2E quantizes where a layer reads, so that pools, concatenations and views before it are float,
    and keep the layers before them from ending in int8. To round and then move gives what to move
    and then round gives, bit by bit: rounding is monotonous, and codes are not rounded twice.

    Returns the number of values quantized earlier.
    """
    hoisted: dict[Node, None] = {}
    changed = 0
    waiting = list(nodes_of(gm, "quantize"))
    while waiting:
        quantize = waiting.pop()
        for value in _moved_values(quantize.kwargs["x"]):
            earlier = _quantized(gm, value, quantize)
            if earlier is not None:
                waiting.append(earlier)
                hoisted[value] = None
                changed += 1
    changed += sum(_share_quantize(gm, value) for value in hoisted)
    return finish(gm, changed)


def _moved_values(mover: object) -> list[Node]:
    """What ``mover`` moves and only a quantize reads, where it is still float."""
    if not isinstance(mover, Node) or len(mover.users) > 1:
        return []
    if mover.target is aten.cat.default:
        values = mover.args[0]
    elif mover.target in MAX_POOLS or is_view(mover) or _repeats_pixels(mover):
        values = mover.args[:1]
    else:
        return []
    assert isinstance(values, list | tuple)
    found = [x for x in values if isinstance(x, Node)]
    # A tensor from outside is quantized where the model does it: nothing is gained before that.
    is_open = all("shape" in x.meta and x.op == "call_function" for x in found)
    return [x for x in dict.fromkeys(found) if dequantized(x) is None] if is_open else []


def _repeats_pixels(node: Node) -> bool:
    return node.target is F.interpolate and node.args[3:4] == ("nearest",)


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


def _share_quantize(gm: GraphModule, value: Node) -> int:
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


def views_on_codes(gm: GraphModule) -> int:
    """Move data, not reals: reshape, slice, permute, shuffle and pad act on codes.

    ``view(dequantize(x))`` becomes ``dequantize(view(x))``; the dequantize then meets a quantize of
    the same qparams further down and both go. Questions about the shape are asked of the codes.

    Returns the number of nodes that now act on codes.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if not node.args:
            continue
        asks = is_question(node)
        codes = _codes_in_shape_of(node.args[0]) if asks else dequantized(node.args[0])
        if codes is None:
            continue
        if asks:
            node.args = (codes, *node.args[1:])
            changed += 1
        elif moves_codes(node):
            changed += _move(gm, node, codes)
        elif node.target is F.pad and len(node.args) == 4 and _pads_with_own_values(node):
            changed += _move_pad(gm, node, codes)
    return finish(gm, changed)


def _codes_in_shape_of(value: object) -> Node | None:
    """The codes that functions of one tensor, value by value, make ``value`` of, if any."""
    while isinstance(value, Node) and value.target in UNARY and value.args:
        value = value.args[0]
    return dequantized(value)


def is_shape_node(node: Node) -> bool:
    """Whether ``node`` moves codes, or computes with sizes: no arithmetic on reals."""
    if is_question(node) or "qparams" in node.meta or node.target is operator.getitem:
        return True
    if "shape" in node.meta:
        return False
    # Not a tensor: a tuple of views, or arithmetic on sizes.
    return moves_codes(node) or getattr(node.target, "__module__", "") in ("_operator", "math")


def _move(gm: GraphModule, node: Node, codes: Node) -> int:
    pieces = [user for user in node.users if _is_item(user, node)]
    if pieces and len(pieces) < len(node.users):
        why(node, "the tuple it returns is used whole")
        return 0
    # A tuple (chunk, split, ...) has no qparams of its own: its items are dequantized.
    outputs = pieces if _is_tuple(node) else [node]
    node.args = (codes, *node.args[1:])
    for output in outputs:
        _dequantize_after(gm, output, codes)
    return 1


def _is_tuple(node: Node) -> bool:
    return "shape" not in node.meta


def _is_item(user: Node, node: Node) -> bool:
    return user.target is operator.getitem and user.args[0] is node and _is_tuple(node)


def _dequantize_after(gm: GraphModule, node: Node, codes: Node) -> None:
    with gm.graph.inserting_after(node):
        real = emit(gm.graph, "dequantize", x=node, **scale_and_zp("x", codes))
    inherit(real, node)  # before the node has qparams: reals have none
    node.meta["qparams"] = qparams_of(codes)
    node.replace_all_uses_with(real, delete_user_cb=lambda user: user is not real)


def _pads_with_own_values(node: Node) -> bool:
    """Whether ``node`` adds zeros, or values that it copies."""
    _, _, mode, value = node.args
    return mode in PAD_MODES and (mode != "constant" or value in (None, 0, 0.0))


def _move_pad(gm: GraphModule, node: Node, codes: Node) -> int:
    given: tuple[Any, ...] = node.args
    _, pad, mode, _ = given
    shape = codes.meta.get("shape")
    before, after = pad[-2::-2], pad[::-2]
    if shape is not None and 3 <= len(shape) == len(before) + 2 and _are_known(pad, mode):
        margins = {"before": before, "after": after, "mode": mode}
        with gm.graph.inserting_before(node):
            new = emit(gm.graph, "pad", node, x=codes, x_zp=qparams_of(codes).zero_point, **margins)
        inherit(new, node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    elif mode == "constant" and not any(isinstance(margin, Node) for margin in pad):
        node.args = (codes, pad, "constant", qparams_of(codes).zero_point)
        new = node
    else:
        return 0
    _dequantize_after(gm, new, codes)
    return 1


def _are_known(margins: Sequence[Any], mode: str) -> bool:
    """Whether ``margins`` are numbers that the kernel takes, or will be once sizes are known."""
    least = -math.inf if mode == "constant" else 0
    return all(computes_a_size(x) if isinstance(x, Node) else x >= least for x in margins)


def sink_permutes(gm: GraphModule) -> int:
    """Networks that permute to channels last around norms and linears lose the permutes.

    ``linear(permute(x))``, where the permute moves channels last, is ``permute(conv1x1(x))``;
    norms, tables and affine maps merely change their axis. A permute so moves down until it meets
    its inverse and both go. Codes lie channels last in memory anyway: nothing is copied either way.

    Returns the number of permutes moved or removed.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node._erased:
            continue
        if (permute := _permute_below(node)) is not None:
            changed += _sink(gm, permute, node)
        elif (first := _inverse_below(node)) is not None:
            replace(node, _permute_node(first.args[0]))
            changed += 1
    return finish(gm, changed)


def permutation(node: object) -> tuple[int, ...] | None:
    """The order of dimensions that ``node`` asks for, when it is a permute."""
    if not isinstance(node, Node) or "shape" not in node.meta:
        return None
    if node.target not in (torch.permute, aten.permute.default, "permute"):
        return None
    rest: tuple[Any, ...] = node.args[1:] or tuple(node.kwargs.values())
    dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    rank = len(node.meta["shape"])
    return tuple(dim % rank for dim in dims)


def _permute_node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _moves_channels_last(node: object) -> bool:
    order = permutation(node)
    return order is not None and len(order) in (4, 5) and order == (0, *range(2, len(order)), 1)


def _permute_below(node: Node) -> Node | None:
    """The permute that feeds ``node``, when ``node`` can act before it."""
    if not is_op(node, "layer_norm", "linear", "lut", "affine", "requantize"):
        return None
    permute = _permute_node(node.kwargs["x"])
    if not _moves_channels_last(permute):
        return None
    last = len(permute.meta["shape"]) - 1
    if is_op(node, "layer_norm") and node.kwargs["axis"] != last:
        return None
    if is_op(node, "linear") and node.kwargs["residual"] is not None:
        return None
    return permute


def _inverse_below(node: Node) -> Node | None:
    """The permute that ``node``, a permute, undoes."""
    order = permutation(node)
    first = node.args[0] if order is not None else None
    before = permutation(first)
    if order is None or before is None or len(before) != len(order):
        return None
    restored = tuple(before[dim] for dim in order)
    return _permute_node(first) if restored == tuple(range(len(order))) else None


def _sink(gm: GraphModule, permute: Node, node: Node) -> int:
    order = permutation(permute)
    assert order is not None
    settings = {**node.kwargs, "x": permute.args[0]}
    name = op_name(node)
    with gm.graph.inserting_before(node):
        if name == "linear":
            name, settings = "conv", _as_convolution(gm, settings, len(order) - 2)
        elif "axis" in settings:
            settings["axis"] = order[settings["axis"]]  # type: ignore[index]
        moved = emit(gm.graph, name, node, **settings)
        moved.meta["qparams"] = node.meta["qparams"]
        shape = node.meta["shape"]
        moved.meta["shape"] = (shape[0], shape[-1], *shape[1:-1])
        moved.meta["order"] = order
        new = inherit(gm.graph.call_function(torch.permute, (moved, order)), node)
    replace(node, new)
    return 1


def _as_convolution(gm: GraphModule, settings: dict[str, Any], spatial: int) -> dict[str, Any]:
    weight = constant(gm, settings["weight"])
    assert weight is not None
    kernel = weight.reshape(*weight.shape, *[1] * spatial)
    return {
        **settings,
        "weight": add_constant(gm, gm.graph, f"{settings['weight'].target}_kernel", kernel),
        "stride": [1] * spatial,
        "padding": [0] * spatial,
        "dilation": [1] * spatial,
        "groups": 1,
        "transposed": False,
        "output_padding": [0] * spatial,
    }
