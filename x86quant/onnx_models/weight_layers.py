"""Nodes with constant weights as PyTorch's layers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from x86quant.onnx_models.graph_building import GraphBuilder, maker
from x86quant.onnx_models.node_view import NodeView
from x86quant.onnx_models.operators.convolving import is_even, torch_order, widths_around

_CONVS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _values(builder: GraphBuilder, seen: NodeView) -> list[Any]:
    return [builder.known[name] for name in seen.inputs]


def _weights(x: Any, *weights: Any) -> bool:
    """Whether ``x`` is computed and all weights, but those left out, are constants of floats."""
    if not isinstance(x, Node):
        return False
    return all(
        weight is None or (isinstance(weight, torch.Tensor) and weight.is_floating_point())
        for weight in weights
    )


def _fill(layer: nn.Module, **values: torch.Tensor | None) -> nn.Module:
    """``layer`` with copies of ``values`` as its parameters and buffers."""
    for name, value in values.items():
        if value is None:
            continue
        own = value.detach().clone().contiguous()
        if name in layer._parameters:
            setattr(layer, name, nn.Parameter(own, requires_grad=own.is_floating_point()))
        else:
            setattr(layer, name, own)
    return layer


@maker("Conv")
def convolution(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A convolution as a layer."""
    x, weight, bias = [*_values(builder, seen), None][:3]
    if not _weights(x, weight, bias) or not 3 <= weight.dim() <= 5:
        return None
    rank, a = weight.dim() - 2, seen.attributes
    strides = tuple(a.get("strides") or [1] * rank)
    dilations = tuple(a.get("dilations") or [1] * rank)
    if a["auto_pad"].startswith("SAME") and max(strides) > 1:
        known = builder.types.of(seen.inputs[0])
        if known is None or known.sizes is None or None in known.sizes[2:]:
            return None  # the padding depends on sizes
        sizes: Sequence[Any] = known.sizes[2:]
    else:
        sizes = [0] * rank
    kernel = tuple(weight.shape[2:])
    pads = widths_around(sizes, kernel, strides, dilations, a.get("pads"), a["auto_pad"])
    even = is_even(pads)
    layer = _CONVS[rank - 1](
        weight.shape[1] * a["group"], weight.shape[0], kernel, strides,
        tuple(pads[:rank]) if even else 0, dilations, a["group"], bias is not None, device="meta",
    )  # fmt: skip
    if not even:
        x = builder.call(nn.functional.pad, x, torch_order(pads))
    return [builder.layer(_fill(layer, weight=weight, bias=bias), seen, x, weight=seen.inputs[1])]


@maker("ConvTranspose")
def transposed_convolution(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A transposed convolution as a layer."""
    x, weight, bias = [*_values(builder, seen), None][:3]
    a = seen.attributes
    if not _weights(x, weight, bias) or not 3 <= weight.dim() <= 5 or a.get("output_shape"):
        return None
    rank = weight.dim() - 2
    pads = list(a.get("pads") or [0] * (2 * rank))
    if a["auto_pad"] not in ("NOTSET", "VALID") or not is_even(pads):
        return None
    strides = tuple(a.get("strides") or [1] * rank)
    dilations = tuple(a.get("dilations") or [1] * rank)
    extra = tuple(a.get("output_padding") or [0] * rank)
    layer = _TRANSPOSED[rank - 1](
        weight.shape[0], weight.shape[1] * a["group"], tuple(weight.shape[2:]), strides,
        tuple(pads[:rank]), extra, a["group"], bias is not None, dilations, device="meta",
    )  # fmt: skip
    return [builder.layer(_fill(layer, weight=weight, bias=bias), seen, x, weight=seen.inputs[1])]


@maker("Gemm")
def gemm(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A product with a constant matrix as a linear."""
    x, weight, bias = [*_values(builder, seen), None][:3]
    a = seen.attributes
    if not _weights(x, weight, bias) or weight.dim() != 2 or a["transA"]:
        return None
    matrix = (weight if a["transB"] else weight.t()) * a["alpha"]
    if bias is not None:
        if bias.numel() not in (1, matrix.shape[0]) or (bias.dim() == 2 and bias.shape[0] != 1):
            return None
        bias = (bias.reshape(-1) * a["beta"]).expand(matrix.shape[0])
    return [_linear(builder, seen, x, matrix, bias)]


@maker("MatMul")
def product(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """The same without a bias, for any number of dimensions before."""
    x, weight = _values(builder, seen)
    if not _weights(x, weight) or weight.dim() != 2:
        return None
    return [_linear(builder, seen, x, weight.t(), None)]


def _linear(builder: GraphBuilder, seen: NodeView, x: Any, matrix: Any, bias: Any) -> Node:
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias is not None, device="meta")
    return builder.layer(_fill(layer, weight=matrix, bias=bias), seen, x, weight=seen.inputs[1])


@maker("BatchNormalization")
def batch_norm(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A batch norm by running statistics as a layer."""
    x, scale, bias, mean, var = _values(builder, seen)
    a = seen.attributes
    rank = builder.rank(seen.inputs[0])
    layer: Any = builder.layer_of(x)
    if rank is None and type(layer) in (*_CONVS, *_TRANSPOSED):
        rank = layer.weight.dim()
    if not _weights(x, scale, bias, mean, var) or rank not in (2, 3, 4, 5):
        return None
    if a.get("training_mode", 0) or not a.get("spatial", 1):
        return None
    norm = _NORMS[rank - 2](len(scale), eps=a["epsilon"])
    norm = _fill(norm, weight=scale, bias=bias, running_mean=mean, running_var=var)
    return [builder.layer(norm, seen, x, weight=seen.inputs[1])]


@maker("LayerNormalization")
def layer_norm(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A layer norm over all dimensions that its weight has."""
    x, scale, bias = [*_values(builder, seen), None][:3]
    rank, axis = builder.rank(seen.inputs[0]), seen.attributes["axis"]
    if not _weights(x, scale, bias) or sum(map(bool, seen.outputs)) > 1:
        return None
    if axis >= 0:
        if rank is None:
            return None
        axis -= rank
    if scale.dim() != -axis:
        return None
    norm = nn.LayerNorm(tuple(scale.shape), eps=seen.attributes["epsilon"], bias=bias is not None)
    return [builder.layer(_fill(norm, weight=scale, bias=bias), seen, x, weight=seen.inputs[1])]


@maker("PRelu")
def prelu(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A slope for all or for each channel."""
    x, slope = _values(builder, seen)
    rank = builder.rank(seen.inputs[0])
    if not _weights(x, slope) or rank is None or rank < 2:
        return None
    sizes = (1,) * (rank - slope.dim()) + tuple(slope.shape)
    if len(sizes) != rank or any(size != 1 for n, size in enumerate(sizes) if n != 1):
        return None
    layer = _fill(nn.PReLU(slope.numel()), weight=slope.reshape(-1))
    return [builder.layer(layer, seen, x, weight=seen.inputs[1])]


@maker("Gather")
def gather(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A table that is looked up, or one place of a dimension."""
    x, index = _values(builder, seen)
    axis = seen.attributes["axis"]
    if isinstance(index, torch.Tensor) and index.dim() == 0 and isinstance(x, Node):
        return [builder.method("select", x, axis, int(index))]
    if not isinstance(index, Node) or not isinstance(x, torch.Tensor) or x.dim() != 2:
        return None
    if not x.is_floating_point() or axis not in (0, -2):
        return None
    table = nn.Embedding(x.shape[0], x.shape[1], device="meta")
    return [builder.layer(_fill(table, weight=x), seen, index, weight=seen.inputs[0])]


#: What a layer's result can be changed by: the dimension of its channels, from the front or back.
_ABSORBING = (*_CONVS, *_TRANSPOSED, nn.Linear)


@maker("Add", "Sub", "Mul", "Div")
def into_layer(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A constant for each channel, added to the only use of a layer's result or multiplied."""
    x, y = _values(builder, seen)
    name, swapped = seen.inputs[0], False
    if isinstance(x, torch.Tensor):
        x, y, name, swapped = y, x, seen.inputs[1], True
    layer: Any = builder.layer_of(x)
    if type(layer) not in _ABSORBING or builder.uses[name] != 1 or not _weights(x, y):
        return None
    if swapped and seen.op_type in ("Sub", "Div"):
        return None
    rank = builder.rank(name) if type(layer) is nn.Linear else layer.weight.dim()
    channels = layer.out_features if type(layer) is nn.Linear else layer.out_channels
    if rank is None or y.dim() > rank or layer.weight.dtype is not y.dtype:
        return None
    sizes = (1,) * (rank - y.dim()) + tuple(y.shape)
    own = rank - 1 if type(layer) is nn.Linear else 1
    if any(size != 1 for n, size in enumerate(sizes) if n != own) or sizes[own] not in (
        1,
        channels,
    ):
        return None
    values = y.detach().reshape(-1).expand(channels)
    with torch.no_grad():
        if seen.op_type in ("Add", "Sub"):
            values = values if seen.op_type == "Add" else -values
            values = values.clone() if layer.bias is None else layer.bias + values
            layer.bias = nn.Parameter(values)
            return [x]
        factor = values if seen.op_type == "Mul" else 1 / values
        spread = [1] * layer.weight.dim()
        if isinstance(layer, _TRANSPOSED):
            if layer.groups != 1:
                return None
            spread[1] = channels
        else:
            spread[0] = channels
        if not bool(torch.isfinite(factor).all()):
            return None
        layer.weight.mul_(factor.reshape(spread))
        if layer.bias is not None:
            layer.bias.mul_(factor)
    return [x]


_LAYERS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
#: PyTorch's order of gates, as places in ONNX's: LSTM i o f c, GRU z r h.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_USUAL = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}


@maker("LSTM", "GRU", "RNN")
def recurrent(builder: GraphBuilder, seen: NodeView) -> Sequence[Any] | None:
    """A recurrent layer, where PyTorch's computes the same."""
    x, w, r, b, lengths, first_h, first_c, peepholes = (_values(builder, seen) + [None] * 8)[:8]
    a, kind = seen.attributes, seen.op_type
    if not _weights(x, w, r, b) or lengths is not None or peepholes is not None:
        return None
    directions, size = w.shape[0], r.shape[-1]
    usual = _USUAL[kind] * directions
    names = [name.lower() for name in a.get("activations") or usual][: len(usual)]
    relu = kind == "RNN" and names == ["relu"] * directions
    if (names != usual and not relu) or "clip" in a or a.get("layout", 0):
        return None
    if a.get("input_forget", 0) or (kind == "GRU" and not a["linear_before_reset"]):
        return None
    extra = {"nonlinearity": "relu" if relu else "tanh"} if kind == "RNN" else {}
    layer = _LAYERS[kind](
        w.shape[-1], size, bias=b is not None, bidirectional=directions == 2, **extra
    )
    gates = _GATES[kind]
    for d in range(directions):
        tail = "_l0_reverse" if d else "_l0"
        values = {"weight_ih": w[d], "weight_hh": r[d]}
        if b is not None:
            values |= {"bias_ih": b[d, : len(gates) * size], "bias_hh": b[d, len(gates) * size :]}
        for name, value in values.items():
            parts = value.chunk(len(gates))
            _fill(layer, **{name + tail: torch.cat([parts[gate] for gate in gates])})
    layer.flatten_parameters()
    backwards = a["direction"] == "reverse"
    if backwards:
        x = builder.call(torch.flip, x, (0,))
    args = [x]
    if first_h is not None or first_c is not None:
        zero = first_h if first_h is not None else first_c
        first_h = first_h if first_h is not None else builder.call(torch.zeros_like, zero)
        if kind == "LSTM":
            first_c = first_c if first_c is not None else builder.call(torch.zeros_like, zero)
        args.append((first_h, first_c) if kind == "LSTM" else first_h)
    made = builder.layer(layer, seen, *args, weight=seen.inputs[1])
    results: list[Any] = [None, None, None]
    outputs = seen.outputs
    if outputs[0]:
        y = builder.graph.call_function(getitem, (made, 0))
        if backwards:
            y = builder.call(torch.flip, y, (0,))
        if directions == 2:
            y = builder.method("unflatten", y, 2, (2, size))
            results[0] = builder.method("permute", y, 0, 2, 1, 3)
        else:
            results[0] = builder.method("unsqueeze", y, 1)
    if any(outputs[1:]):
        state = builder.graph.call_function(getitem, (made, 1))
        if kind != "LSTM":
            results[1] = state
        else:
            for n in (1, 2):
                if len(outputs) > n and outputs[n]:
                    results[n] = builder.graph.call_function(getitem, (state, n - 1))
    return results[: len(outputs)]
