"""The shape of every value of a segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import attribute, is_op, op_name
from x86quant.runtime import layout

_FLOAT = torch.float32


def infer_shapes(graph_module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """A ``torch.Size`` for a tensor, the value itself for anything else.

    Raises:
        RuntimeError, ValueError, IndexError: an op of the graph cannot take what it gets.
    """
    return _Shapes(graph_module).of_all(inputs)


class _Shapes:
    """Walks the graph with sizes; with tensors without data where torch's own calls need them.

    Running an op of ours on tensors without data takes a thousand times as long as its rule.
    """

    def __init__(self, root: GraphModule) -> None:
        self.root = root
        self.values: dict[Node, Any] = {}
        self.dtypes: dict[Node, torch.dtype] = {}

    def of_all(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        given = iter(inputs)
        for node in self.root.graph.nodes:
            if node.op == "placeholder":
                self._set(node, next(given))
            elif node.op not in ("get_attr", "output"):
                self._call(node)
        return self.values

    def size(self, node: Any) -> torch.Size:
        """The sizes of a tensor, a constant of the graph among them."""
        if node.op == "get_attr":
            tensor: torch.Tensor = attribute(self.root, str(node.target))
            return tensor.shape
        size = self.values[node]
        if not isinstance(size, torch.Size):
            raise ValueError(f"{node.name} is no tensor")
        return size

    def _set(self, node: Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.dtypes[node] = value.dtype
            self.values[node] = value.shape
        else:  # a torch.Size here is the shape of a tensor, not a value that happens to be one
            self.values[node] = tuple(value) if isinstance(value, torch.Size) else value

    def _call(self, node: Node) -> None:
        if is_op(node):
            size = self._by_rule(node, op_name(node))
            if size is not None:
                self.values[node] = torch.Size(size)
                self.dtypes[node] = _FLOAT if op_name(node) == "dequantize" else torch.uint8
                return
        args = map_arg(node.args, self._meta)
        kwargs = map_arg(node.kwargs, self._meta)
        if node.op == "call_method":
            self._set(node, getattr(args[0], str(node.target))(*args[1:], **kwargs))
        else:
            self._set(node, node.target(*args, **kwargs))  # type: ignore[operator]

    def _by_rule(self, node: Node, name: str) -> Sequence[int] | None:
        """None where the op itself should say, or complain."""
        rule = _RULES.get(name)
        wanted = _FLOAT if name == "quantize" else torch.uint8
        if rule is None or any(
            self.dtypes.get(n) is not wanted for n in node.all_input_nodes if n in self.values
        ):
            return None
        return rule(self, node.kwargs)

    def _meta(self, node: Node) -> Any:
        """A tensor without data as ops of ours return it, or the value itself."""
        if node.op == "get_attr":
            tensor: torch.Tensor = attribute(self.root, str(node.target))
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        size = self.values[node]
        if isinstance(size, torch.Size):
            rank = len(size)
            order = layout.channels_last_order(rank) if rank in (4, 5) else range(rank)
            return layout.like(size, order, self.dtypes[node])
        return size


_Rule = Callable[[_Shapes, Any], "Sequence[int] | None"]


def _same(shapes: _Shapes, kwargs: Any) -> Sequence[int]:
    return shapes.size(kwargs["x"])


def _binary(shapes: _Shapes, kwargs: Any) -> Sequence[int] | None:
    a, b = shapes.size(kwargs["a"]), shapes.size(kwargs["b"])
    return a if a == b else torch.broadcast_shapes(a, b)  # type: ignore[no-untyped-call]


def _linear(shapes: _Shapes, kwargs: Any) -> Sequence[int] | None:
    x = shapes.size(kwargs["x"])
    outputs, inputs = shapes.size(kwargs["weight"])
    if len(x) < 2 or x[-1] != inputs:
        return None
    return _beside_residual([*x[:-1], outputs], kwargs, shapes)


def _conv(shapes: _Shapes, kwargs: Any) -> Sequence[int] | None:
    x = shapes.size(kwargs["x"])
    weight = shapes.size(kwargs["weight"])
    if kwargs["transposed"]:
        channels, outputs = weight[0], weight[1] * kwargs["groups"]
    else:
        channels, outputs = weight[1] * kwargs["groups"], weight[0]
    if len(x) != len(weight) or x[1] != channels:
        return None
    geometry = zip(
        x[2:], weight[2:], kwargs["stride"], kwargs["padding"], kwargs["dilation"],
        kwargs["output_padding"] or [0] * (len(x) - 2), strict=False,
    )  # fmt: skip
    sizes = [
        (size - 1) * stride - 2 * padding + dilation * (window - 1) + extra + 1
        if kwargs["transposed"]
        else (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
        for size, window, stride, padding, dilation, extra in geometry
    ]
    if len(sizes) != len(x) - 2 or min(sizes, default=1) < 1:
        return None
    return _beside_residual([x[0], outputs, *sizes], kwargs, shapes)


def _beside_residual(shape: list[int], kwargs: Any, shapes: _Shapes) -> Sequence[int] | None:
    residual = kwargs["residual"]
    return shape if residual is None or list(shapes.size(residual)) == shape else None


def _window(shapes: _Shapes, kwargs: Any) -> Sequence[int] | None:
    x = shapes.size(kwargs["x"])
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


def _per_channel(shapes: _Shapes, kwargs: Any) -> Sequence[int] | None:
    x = shapes.size(kwargs["x"])
    if not -len(x) <= kwargs["axis"] < len(x):
        return None
    parameters = [kwargs[name] for name in ("scale", "shift", "weight", "bias") if kwargs.get(name)]
    sizes = {shapes.size(parameter).numel() for parameter in parameters}
    return x if sizes <= {1, x[kwargs["axis"]]} else None


def _upsample(shapes: _Shapes, kwargs: Any) -> Sequence[int]:
    real = torch.empty(shapes.size(kwargs["x"]), device="meta")
    size = map_arg(kwargs["size"], shapes.values.__getitem__)
    names = ("scale_factor", "mode", "align_corners")
    return F.interpolate(real, size, *(kwargs[name] for name in names)).shape


def _adaptive(shapes: _Shapes, kwargs: Any) -> Sequence[int] | None:
    x = shapes.size(kwargs["x"])
    wanted = kwargs["output_size"]
    if len(x) != len(wanted) + 2 or not 1 <= len(wanted) <= 3:
        return None
    return [*x[:2], *(now if w < 0 else w for now, w in zip(x[2:], wanted, strict=True))]


def _cat(shapes: _Shapes, kwargs: Any) -> Sequence[int] | None:
    sizes = [list(shapes.size(x)) for x in kwargs["xs"]]
    first = sizes[0]
    if not -len(first) <= kwargs["dim"] < len(first):
        return None
    dim = kwargs["dim"] % len(first)
    rest = [(len(s), s[:dim], s[dim + 1 :]) for s in sizes]
    if any(r != rest[0] for r in rest):
        return None
    return [*first[:dim], sum(s[dim] for s in sizes), *first[dim + 1 :]]


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
