"""The shape of every value of a segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import attribute, is_op, op_name
from x86quant.runtime import layout


def infer_shapes(graph_module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """A ``torch.Size`` for a tensor, the value itself for anything else.

    Raises:
        RuntimeError, ValueError: an op of the graph cannot take what it gets.
    """
    given = iter(inputs)
    values: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            x = next(given)
            values[node] = _without_data(x) if isinstance(x, torch.Tensor) else x
        elif node.op == "output":
            values[node] = torch.fx.node.map_arg(node.args[0], values.__getitem__)
        elif node.op != "get_attr":
            values[node] = _result(graph_module, node, values)
    return {
        node: value.shape if isinstance(value, torch.Tensor) else value
        for node, value in values.items()
    }


def _without_data(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _result(root: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    """What ``node`` yields, on tensors without data."""
    if is_op(node):
        shape = _shape(root, node, values)
        if shape is not None:
            dtype = torch.float32 if is_op(node, "dequantize") else torch.uint8
            rank = len(shape)
            order = layout.channels_last_order(rank) if rank in (4, 5) else range(rank)
            return layout.like(shape, order, dtype)

    def value_of(n: Node) -> Any:
        return values[n] if n in values else _without_data(attribute(root, str(n.target)))

    args = torch.fx.node.map_arg(node.args, value_of)
    kwargs = torch.fx.node.map_arg(node.kwargs, value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _shape(root: GraphModule, node: Node, values: dict[Node, Any]) -> Sequence[int] | None:
    """The shape by the rule for this op; None where the op itself should say, or complain.

    Running an op of ours on tensors without data takes a thousand times as long.
    """
    rule = _RULES.get(op_name(node))
    return None if rule is None else rule(root, node.kwargs, values)


_Rule = Callable[[GraphModule, Any, dict[Node, Any]], "Sequence[int] | None"]


def _same(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int]:
    shape: torch.Size = values[kwargs["x"]].shape
    return shape


def _binary(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int] | None:
    a, b = values[kwargs["a"]].shape, values[kwargs["b"]].shape
    return a if a == b else torch.broadcast_shapes(a, b)


def _linear(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int] | None:
    x = values[kwargs["x"]].shape
    outputs, inputs = attribute(root, kwargs["weight"].target).shape
    if len(x) < 2 or x[-1] != inputs:
        return None
    return _beside_residual([*x[:-1], outputs], kwargs, values)


def _conv(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int] | None:
    x = values[kwargs["x"]].shape
    weight = attribute(root, kwargs["weight"].target).shape
    if kwargs["transposed"]:
        channels, outputs = weight[0], weight[1] * kwargs["groups"]
    else:
        channels, outputs = weight[1] * kwargs["groups"], weight[0]
    if len(x) != len(weight) or x[1] != channels:
        return None
    geometry = zip(
        x[2:], weight[2:], kwargs["stride"], kwargs["padding"], kwargs["dilation"],
        kwargs["output_padding"] or [0] * (len(x) - 2),
    )  # fmt: skip
    sizes = [
        (size - 1) * stride - 2 * padding + dilation * (window - 1) + extra + 1
        if kwargs["transposed"]
        else (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        for size, window, stride, padding, dilation, extra in geometry
    ]
    if len(sizes) != len(x) - 2 or min(sizes, default=1) < 1:
        return None
    return _beside_residual([x[0], outputs, *sizes], kwargs, values)


def _beside_residual(
    shape: list[int], kwargs: Any, values: dict[Node, Any]
) -> Sequence[int] | None:
    residual = kwargs["residual"]
    return shape if residual is None or list(values[residual].shape) == shape else None


def _window(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int] | None:
    x = values[kwargs["x"]].shape
    windows = kwargs["kernel_size"]
    stride, padding = kwargs["stride"] or windows, kwargs["padding"]
    dilation = kwargs.get("dilation") or [1] * len(windows)
    if kwargs["ceil_mode"] or not len(x) - 2 == len(windows) == len(stride) == len(padding):
        return None
    if any(2 * p > w for p, w in zip(padding, windows, strict=True)):
        return None
    sizes = [
        (size + 2 * p - d * (w - 1) - 1) // s + 1
        for size, w, s, p, d in zip(x[2:], windows, stride, padding, dilation, strict=True)
    ]
    return None if min(sizes) < 1 else [*x[:2], *sizes]


def _per_channel(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int] | None:
    x = values[kwargs["x"]].shape
    if not -len(x) <= kwargs["axis"] < len(x):
        return None
    parameters = [kwargs[name] for name in ("scale", "shift", "weight", "bias") if kwargs.get(name)]
    sizes = {attribute(root, str(parameter.target)).numel() for parameter in parameters}
    return x if sizes <= {1, x[kwargs["axis"]]} else None


def _upsample(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int]:
    real = torch.empty(values[kwargs["x"]].shape, device="meta")
    size = torch.fx.node.map_arg(kwargs["size"], values.__getitem__)
    names = ("scale_factor", "mode", "align_corners")
    return F.interpolate(real, size, *(kwargs[name] for name in names)).shape


def _adaptive(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int] | None:
    x = values[kwargs["x"]].shape
    wanted = kwargs["output_size"]
    if len(x) != len(wanted) + 2 or not 1 <= len(wanted) <= 3:
        return None
    return [*x[:2], *(now if w < 0 else w for now, w in zip(x[2:], wanted, strict=True))]


def _cat(root: GraphModule, kwargs: Any, values: dict[Node, Any]) -> Sequence[int] | None:
    shapes = [list(values[x].shape) for x in kwargs["xs"]]
    first = shapes[0]
    if not -len(first) <= kwargs["dim"] < len(first):
        return None
    dim = kwargs["dim"] % len(first)
    rest = [(len(s), s[:dim], s[dim + 1 :]) for s in shapes]
    if any(r != rest[0] for r in rest):
        return None
    return [*first[:dim], sum(s[dim] for s in shapes), *first[dim + 1 :]]


_RULES: dict[str, _Rule] = {
    "adaptive_avg_pool": _adaptive,
    "add": _binary,
    "affine": _per_channel,
    "avg_pool": _window,
    "cat": _cat,
    "conv": _conv,
    "dequantize": _same,
    "layer_norm": _per_channel,
    "linear": _linear,
    "lut": _same,
    "max_pool": _window,
    "mul": _binary,
    "quantize": _same,
    "requantize": _same,
    "upsample": _upsample,
}
