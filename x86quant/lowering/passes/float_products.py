"""Convolutions that stay in float: native ones, with the functions and the codes behind them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import (
    add_constant,
    constant,
    emit,
    finish,
    is_op,
    nodes_of,
    replace,
    set_kwargs,
    sole_user,
)

aten = torch.ops.aten

_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Tensors = tuple[torch.Tensor, "torch.Tensor | None"]


def lower_float_convolution(gm: GraphModule) -> int:
    """A convolution that stays in float becomes ``x86quant.float_conv``.

    Those with groups stay as they are, but for depthwise ones, and those that torch is faster at.

    Returns the number of convolutions.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        found = _of_module(gm, node) or _of_function(gm, node)
        if found is None:
            continue
        (weight, bias), window = found
        if len(node.meta.get("shape") or ()) != weight.dim() or not _pays(weight, window):
            continue
        with gm.graph.inserting_before(node):
            given = {
                name: tensor
                if tensor is None
                else add_constant(gm, gm.graph, f"{node.name}_{name}", tensor.detach())
                for name, tensor in (("weight", weight), ("bias", bias))
            }
            floats = emit(
                gm.graph, "float_conv", node, x=node.args[0],
                **given, **window, functions=[], numbers=[],
            )  # fmt: skip
        if "why" in node.meta:
            floats.meta["why"] = node.meta["why"]
        replace(node, floats)
        changed += 1
    return finish(gm, changed)


#: Fewer channels of a depthwise convolution than these fill no vector; windows of many lines of
#: fewer floats take longer to copy than torch does to multiply them.
_LEAST_CHANNELS, _LEAST_LINE, _MANY_LINES = 16, 4, 16


def _pays(weight: torch.Tensor, window: dict[str, Any]) -> bool:
    """Whether the native convolution takes no longer than torch's."""
    if window["groups"] != 1:
        depthwise = window["groups"] == weight.shape[0] and weight.shape[1] == 1
        return depthwise and weight.shape[0] >= _LEAST_CHANNELS
    line = weight.shape[1] * weight.shape[-1]
    return line >= _LEAST_LINE or weight[0].numel() <= _MANY_LINES * line


def _of_module(gm: GraphModule, node: Node) -> tuple[_Tensors, dict[str, Any]] | None:
    module = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
    if type(module) not in _MODULES or len(node.args) != 1 or node.kwargs:
        return None
    conv: Any = module
    if conv.padding_mode != "zeros" or not _are_plain(conv.weight, conv.bias):
        return None
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    padding = conv.padding
    if padding == "same" and not any(size % 2 for size in reach):
        padding = [size // 2 for size in reach]
    elif padding == "valid":
        padding = [0] * len(reach)
    if isinstance(padding, str):
        return None
    numbers = {"stride": conv.stride, "padding": padding, "dilation": conv.dilation}
    window = {name: list(given) for name, given in numbers.items()}
    return (conv.weight, conv.bias), {**window, "groups": conv.groups}


def _of_function(gm: GraphModule, node: Node) -> tuple[_Tensors, dict[str, Any]] | None:
    if node.target is not aten.convolution.default:
        return None
    _, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    tensor, second = constant(gm, weight), constant(gm, bias)
    if transposed or tensor is None or (bias is not None and second is None):
        return None
    if not _are_plain(tensor, second):
        return None
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (tensor, second), window


def _are_plain(weight: object, bias: object) -> bool:
    return all(
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.dtype == torch.float32
        for tensor in (weight, bias)
        if tensor is not None
    )


# --- functions ---------------------------------------------------------------------------------

_Functions = list[tuple[str, float]]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _bounds(low: object = None, high: object = None) -> _Functions | None:
    given = (("least", low), ("most", high))
    bounds = [(name, bound) for name, bound in given if bound is not None]
    return [(n, float(b)) for n, b in bounds] if all(_number(b) for _, b in bounds) else None  # type: ignore[arg-type]


def _scaled(by: Callable[[float], tuple[str, float]]) -> Callable[..., _Functions | None]:
    def functions(*numbers: Any) -> _Functions | None:
        return [by(float(numbers[0]))] if len(numbers) == 1 and _number(numbers[0]) else None

    return functions


_UP_TO_SIX: _Functions = [("add", 3.0), ("least", 0.0), ("most", 6.0)]

#: By what a node calls with one tensor: the functions that are the same, from its other arguments.
_FUNCTIONS: dict[object, Callable[..., _Functions | None]] = {
    aten.relu.default: lambda: [("least", 0.0)],
    aten.clamp.default: _bounds,
    aten.sigmoid.default: lambda: [("sigmoid", 0.0)],
    aten.tanh.default: lambda: [("tanh", 0.0)],
    aten.silu.default: lambda: [("x", 0.0), ("sigmoid", 0.0), ("times_x", 0.0)],
    aten.hardswish.default: lambda: [("x", 0.0), *_UP_TO_SIX, ("times_x", 0.0), ("mul", 1 / 6)],
    aten.hardsigmoid.default: lambda: [*_UP_TO_SIX, ("mul", 1 / 6)],
    aten.neg.default: lambda: [("mul", -1.0)],
    aten.add.Scalar: _scaled(lambda n: ("add", n)),
    aten.sub.Scalar: _scaled(lambda n: ("add", -n)),
    aten.mul.Scalar: _scaled(lambda n: ("mul", n)),
    aten.div.Scalar: _scaled(lambda n: ("mul", 1 / n if n else math.nan)),
}


def _functions_of(node: Node, y: Node) -> _Functions | None:
    """What ``node`` computes of ``y`` alone."""
    rule = _FUNCTIONS.get(node.target)
    if rule is None or node.args[0] is not y or node.kwargs:
        return None
    found = rule(*node.args[1:])
    return found if found and all(math.isfinite(number) for _, number in found) else None


def fuse_float_functions(gm: GraphModule) -> int:
    """Elementwise functions of a ``float_conv`` alone are computed with it, however spelled.

    Returns the number of convolutions that got some.
    """
    changed = 0
    for conv in nodes_of(gm, "float_conv"):
        last, functions = _chain(conv)
        if last is conv:
            continue
        set_kwargs(
            conv,
            functions=[name for name, _ in functions],
            numbers=[number for _, number in functions],
        )
        for key in ("source", "shape", "order"):
            if key in last.meta:
                conv.meta[key] = last.meta[key]
        last.replace_all_uses_with(conv)
        _erase_unused(last, conv)
        changed += 1
    return finish(gm, changed)


def _chain(conv: Node) -> tuple[Node, _Functions]:
    """The last node that is a function of ``conv`` alone, and the functions up to there.

    A value that two nodes read becomes the x of the functions behind it, until it is multiplied in.
    """
    functions: _Functions = []
    x = y = conv
    pending: set[Node] = set()  # readers of x that are still to come
    found, so_far = conv, functions
    while True:
        readers = list(y.users)
        if y is not x and len(readers) > 1:
            if pending:
                break
            x, functions = y, [*functions, ("x", 0.0)]
        if y is x:
            pending = set(readers)
        known = [(node, _next(node, x, y, bool(pending - {node}))) for node in readers]
        step = next(((node, more) for node, more in known if more is not None), None)
        if step is None:
            break
        y, functions = step[0], [*functions, *step[1]]
        pending.discard(y)
        if not pending:
            found, so_far = y, functions
    if so_far and so_far[0][0] == "x":
        so_far = so_far[1:]
    return found, so_far


def _next(node: Node, x: Node, y: Node, x_is_wanted: bool) -> _Functions | None:
    """What ``node`` adds to the functions whose last one gave ``y``."""
    if node.target is aten.mul.Tensor and set(node.args) == {x, y} and (x is not y):
        return [("times_x", 0.0)]
    found = _functions_of(node, y)
    if found is None or (x_is_wanted and found[0][0] == "x"):
        return None
    return found


def _erase_unused(last: Node, conv: Node) -> None:
    """Erase the nodes from ``last`` back to ``conv`` that nobody reads."""
    wanted = [last]
    while wanted:
        node = wanted.pop()
        if node is conv or node._erased or node.users:
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        wanted += inputs


def fuse_float_rounding(gm: GraphModule) -> int:
    """A ``float_conv`` that one ``quantize`` alone reads gives codes.

    Returns the number of convolutions.
    """
    changed = 0
    for conv in nodes_of(gm, "float_conv"):
        quantize = sole_user(conv)
        if quantize is None or not is_op(quantize, "quantize"):
            continue
        given = {name: value for name, value in conv.kwargs.items() if name != "contiguous"}
        with gm.graph.inserting_before(quantize):
            codes = emit(
                gm.graph, "float_conv_codes", quantize, **given,
                out_scale=quantize.kwargs["out_scale"], out_zp=quantize.kwargs["out_zp"],
            )  # fmt: skip
        for key in ("why", "layer"):
            if key in conv.meta:
                codes.meta[key] = conv.meta[key]
        replace(quantize, codes)
        gm.graph.erase_node(conv)
        changed += 1
    return finish(gm, changed)
