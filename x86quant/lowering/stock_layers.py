"""What each quantized module and function of stock PyTorch means in float.

Data: two tables from stock types to converters. A converter emits the float computation through
the ``Builder``; the walk then quantizes the result with the qparams the stock op used. This module
imports torch.ao, and is imported when a model has layers of it (``float_forms``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.intrinsic.quantized.dynamic as nniqd
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.dynamic as nnqd
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Node

from x86quant.lowering.builder import (
    Builder,
    FunctionConverter,
    ModuleConverter,
    convolution,
    linear,
    optional,
)
from x86quant.lowering.graph_tools import emit, symmetric_int8

aten = torch.ops.aten
_quantized = torch.ops.quantized


# --- convolution and linear ------------------------------------------------------------------


def _dynamic_linear_module(activation: str | None = None) -> ModuleConverter:
    def convert(builder: Builder, path: str, module: Any, x: Any) -> Any:
        weight, bias = module.weight(), module.bias()
        quantized = symmetric_int8(weight)
        if quantized is None:  # float16, or with a zero point
            y = linear(builder, path, x, weight, bias)
            return y if activation is None else builder.call(F.relu, y)
        codes, scales = quantized
        return emit(
            builder.graph,
            "linear_dynamic",
            x=x,
            weight=builder.constant(f"{path}_weight", codes),
            weight_scale=builder.constant(
                f"{path}_weight_scale", scales.to(torch.float32).expand(len(codes)).contiguous()
            ),
            bias=optional(builder, f"{path}_bias", bias),
            activation=activation,
        )

    return convert


def _conv_module(then: Any = None, adds: bool = False) -> ModuleConverter:
    def convert(builder: Builder, path: str, module: Any, x: Any, extra: Any = None) -> Any:
        y = convolution(builder, path, module, x, module.weight(), module.bias())
        if adds:
            y = builder.call(torch.add, y, extra)
        return y if then is None else builder.call(then, y)

    return convert


def _linear_module(then: Callable[[Any], tuple[Any, ...]] | None = None) -> ModuleConverter:
    def convert(builder: Builder, path: str, module: Any, x: Any) -> Any:
        y = linear(builder, path, x, module.weight(), module.bias())
        if then is None:
            return y
        function, *arguments = then(module)
        return builder.call(function, y, *arguments)

    return convert


def _reference_conv(builder: Builder, path: str, module: Any, x: Any) -> Any:
    return convolution(builder, path, module, x, module.get_quantized_weight(), module.bias)


def _reference_linear(builder: Builder, path: str, module: Any, x: Any) -> Any:
    return linear(builder, path, x, module.get_quantized_weight(), module.bias)


# --- the other modules -----------------------------------------------------------------------


def _unary_module(function: Any, *names: str) -> ModuleConverter:
    def convert(builder: Builder, path: str, module: Any, x: Any) -> Any:
        return builder.call(function, x, *(getattr(module, name) for name in names))

    return convert


def _identity_module(builder: Builder, path: str, module: Any, x: Any) -> Any:
    return x


def _batch_norm_module(then: Any = None) -> ModuleConverter:
    def convert(builder: Builder, path: str, module: Any, x: Any) -> Any:
        names = ("running_mean", "running_var", "weight", "bias")
        tensors = [builder.constant(f"{path}_{n}", getattr(module, n)) for n in names]
        y = builder.call(F.batch_norm, x, *tensors, eps=module.eps)
        return y if then is None else builder.call(then, y)

    return convert


def _layer_norm_module(builder: Builder, path: str, module: Any, x: Any) -> Any:
    weight = optional(builder, f"{path}_weight", module.weight)
    bias = optional(builder, f"{path}_bias", module.bias)
    return builder.call(F.layer_norm, x, module.normalized_shape, weight, bias, module.eps)


def _group_norm_module(builder: Builder, path: str, module: Any, x: Any) -> Any:
    weight = optional(builder, f"{path}_weight", module.weight)
    bias = optional(builder, f"{path}_bias", module.bias)
    return builder.call(F.group_norm, x, module.num_groups, weight, bias, module.eps)


def _instance_norm_module(builder: Builder, path: str, module: Any, x: Any) -> Any:
    weight = optional(builder, f"{path}_weight", module.weight)
    bias = optional(builder, f"{path}_bias", module.bias)
    return builder.call(F.instance_norm, x, weight=weight, bias=bias, eps=module.eps)


def _prelu_module(builder: Builder, path: str, module: Any, x: Any) -> Any:
    return builder.call(F.prelu, x, builder.constant(f"{path}_weight", module.weight.dequantize()))


def _embedding_module(builder: Builder, path: str, module: Any, x: Any) -> Any:
    return builder.call(F.embedding, x, _table(builder, path, module), module.padding_idx)


def _embedding_bag_module(
    builder: Builder, path: str, module: Any, x: Any, offsets: Any = None, weights: Any = None
) -> Any:
    return builder.call(
        F.embedding_bag,
        x,
        _table(builder, path, module),
        offsets,
        mode=module.mode,
        per_sample_weights=weights,
        include_last_offset=module.include_last_offset,
        padding_idx=module.padding_idx,
    )


def _table(builder: Builder, path: str, module: Any) -> Node:
    """The rows of an embedding, rounded once: the stock module does it at each call."""

    def rounded() -> torch.Tensor:
        table: torch.Tensor = module.get_weight().dequantize().detach()
        if module.max_norm is None:
            return table
        return torch.renorm(table, module.norm_type, 0, module.max_norm)

    return builder.shared(f"{path}_weight", rounded)


def _softmax_module(builder: Builder, path: str, module: Any, x: Any) -> Any:
    return builder.call(nn.functional.softmax, x, module.dim)


#: Modules that are a convolution or linear followed by something, as a plain sequence.
FUSED: frozenset[type[nn.Module]] = frozenset(
    {
        nni.ConvReLU1d,
        nni.ConvReLU2d,
        nni.ConvReLU3d,
        nni.LinearReLU,
        nni.BNReLU2d,
        nni.BNReLU3d,
    }
)

MODULES: dict[type[nn.Module], ModuleConverter] = {
    **{
        kind: _conv_module()
        for kind in (
            nnq.Conv1d,
            nnq.Conv2d,
            nnq.Conv3d,
            nnq.ConvTranspose1d,
            nnq.ConvTranspose2d,
            nnq.ConvTranspose3d,
        )
    },
    **{kind: _conv_module(F.relu) for kind in (nniq.ConvReLU1d, nniq.ConvReLU2d, nniq.ConvReLU3d)},
    nniq.ConvAdd2d: _conv_module(adds=True),
    nniq.ConvAddReLU2d: _conv_module(F.relu, adds=True),
    nnq.Linear: _linear_module(),
    nniq.LinearReLU: _linear_module(lambda module: (F.relu,)),
    nniq.LinearLeakyReLU: _linear_module(lambda module: (F.leaky_relu, module.negative_slope)),
    nniq.LinearTanh: _linear_module(lambda module: (torch.tanh,)),
    nnqd.Linear: _dynamic_linear_module(),
    nniqd.LinearReLU: _dynamic_linear_module("relu"),
    **dict.fromkeys(
        (
            nnqr.Conv1d,
            nnqr.Conv2d,
            nnqr.Conv3d,
            nnqr.ConvTranspose1d,
            nnqr.ConvTranspose2d,
            nnqr.ConvTranspose3d,
        ),
        _reference_conv,
    ),
    nnqr.Linear: _reference_linear,
    nnqr.Embedding: _embedding_module,
    nnqr.EmbeddingBag: _embedding_bag_module,
    nnq.BatchNorm2d: _batch_norm_module(),
    nnq.BatchNorm3d: _batch_norm_module(),
    nniq.BNReLU2d: _batch_norm_module(F.relu),
    nniq.BNReLU3d: _batch_norm_module(F.relu),
    nnq.ReLU6: _unary_module(F.relu6),
    nnq.Hardswish: _unary_module(F.hardswish),
    nnq.ELU: _unary_module(F.elu, "alpha"),
    nnq.LeakyReLU: _unary_module(F.leaky_relu, "negative_slope"),
    nnq.Sigmoid: _unary_module(torch.sigmoid),
    nnq.Softmax: _softmax_module,
    nnq.PReLU: _prelu_module,
    nnq.LayerNorm: _layer_norm_module,
    nnq.GroupNorm: _group_norm_module,
    nnq.InstanceNorm1d: _instance_norm_module,
    nnq.InstanceNorm2d: _instance_norm_module,
    nnq.InstanceNorm3d: _instance_norm_module,
    nnq.Dropout: _identity_module,
    nnq.Quantize: _identity_module,
    nnq.DeQuantize: _identity_module,
}

# --- functions -------------------------------------------------------------------------------


def _quantize(builder: Builder, node: Node, input: Any, *_: Any, **__: Any) -> Any:
    # The walk quantizes the result, whose qparams it has seen.
    return input


def _dequantize(builder: Builder, node: Node, x: Any) -> Any:
    return x


def _binary(function: Any, relu: bool = False) -> FunctionConverter:
    def convert(builder: Builder, node: Node, a: Any, b: Any, *_: Any, **__: Any) -> Any:
        y = builder.call(function, a, b)
        return builder.call(F.relu, y) if relu else y

    return convert


def _cat(relu: bool = False) -> FunctionConverter:
    def convert(builder: Builder, node: Node, xs: Any, dim: int = 0, *_: Any, **__: Any) -> Any:
        y = builder.call(torch.cat, list(xs), dim)
        return builder.call(F.relu, y) if relu else y

    return convert


def _unary(function: Any) -> FunctionConverter:
    """Ops spelled ``op(x, scale, zero_point)``: nothing but x matters to the float function."""

    def convert(builder: Builder, node: Node, x: Any, *_: Any, **__: Any) -> Any:
        return builder.call(function, x)

    return convert


def _scaled_unary(function: Any) -> FunctionConverter:
    """Ops spelled ``op(x, scale, zero_point, alpha)``."""

    def convert(
        builder: Builder, node: Node, x: Any, scale: Any, zero_point: Any, *args: Any, **kwargs: Any
    ) -> Any:
        value = kwargs.get("alpha", args[0] if args else None)
        return builder.call(function, x, *(() if value is None else (value,)))

    return convert


def _norm(function: Any) -> FunctionConverter:
    """``op(x, what, weight, bias, eps, scale, zero_point)``: layer norm and group norm."""

    def convert(
        builder: Builder,
        node: Node,
        x: Any,
        what: Any,
        weight: Any,
        bias: Any,
        eps: float,
        *_: Any,
        **__: Any,
    ) -> Any:
        return builder.call(function, x, what, weight, bias, eps)

    return convert


def _instance_norm(
    builder: Builder, node: Node, x: Any, weight: Any, bias: Any, eps: float, *_: Any, **__: Any
) -> Any:
    return builder.call(F.instance_norm, x, weight=weight, bias=bias, eps=eps)


def _batch_norm(relu: bool = False) -> FunctionConverter:
    def convert(
        builder: Builder,
        node: Node,
        x: Any,
        weight: Any,
        bias: Any,
        mean: Any,
        var: Any,
        eps: float,
        *_: Any,
        **__: Any,
    ) -> Any:
        y = builder.call(F.batch_norm, x, mean, var, weight, bias, eps=eps)
        return builder.call(F.relu, y) if relu else y

    return convert


def _dropout(
    builder: Builder, node: Node, x: Any, *_: Any, p: float = 0.5, training: bool = False, **__: Any
) -> Any:
    return builder.call(F.dropout, x, p, training)


def _parameterized(function: Any) -> FunctionConverter:
    """``op(x, parameter, scale, zero_point)``."""

    def convert(builder: Builder, node: Node, x: Any, parameter: Any, *_: Any, **__: Any) -> Any:
        return builder.call(function, x, parameter)

    return convert


def _packed(builder: Builder, packed: Node) -> Any:
    return getattr(builder.root, str(packed.target))


def _conv_function(unpack: Any, relu: bool) -> FunctionConverter:
    def convert(builder: Builder, node: Node, x: Any, packed: Node, *_: Any, **__: Any) -> Any:
        parameters = _packed(builder, packed)
        weight, bias = unpack(parameters)
        dims = weight.dim() - 2
        # conv1d is packed as a conv2d of height 1: the last numbers are its own.
        sizes = {
            name: list(getattr(parameters, name)())[-dims:]
            for name in ("stride", "padding", "dilation", "output_padding")
        }
        hint = str(packed.target)
        transposed = bool(parameters.transpose())
        y = builder.call(
            aten.convolution.default,
            x,
            builder.weight(hint, weight, parameters.groups() if transposed else 0),
            None if bias is None else builder.constant(f"{hint}_bias", bias),
            sizes["stride"],
            sizes["padding"],
            sizes["dilation"],
            transposed,
            sizes["output_padding"],
            parameters.groups(),
        )
        return builder.call(F.relu, y) if relu else y

    return convert


def _linear_function(relu: bool = False) -> FunctionConverter:
    def convert(builder: Builder, node: Node, x: Any, packed: Node, *_: Any, **__: Any) -> Any:
        weight, bias = _quantized.linear_unpack(_packed(builder, packed))
        y = linear(builder, str(packed.target), x, weight, bias)
        return builder.call(F.relu, y) if relu else y

    return convert


def _quantized_weight(builder: Builder, node: Node, weight: Any, *args: Any) -> Any:
    """``quantize_per_channel`` of a constant, as the functional reference form has it."""
    value = getattr(builder.root, str(weight.target)) if weight.op == "get_attr" else None
    parameters = [getattr(builder.root, str(a.target)) if isinstance(a, Node) else a for a in args]
    if value is None:
        return builder.graph.call_function(torch.quantize_per_channel, (weight, *args))
    return builder.weight(str(weight.target), torch.quantize_per_channel(value, *parameters))


FUNCTIONS: dict[object, FunctionConverter] = {
    torch.quantize_per_tensor: _quantize,
    torch.quantize_per_channel: _quantized_weight,
    torch.dequantize: _dequantize,
    _quantized.add: _binary(torch.add),
    _quantized.add_relu: _binary(torch.add, relu=True),
    _quantized.mul: _binary(torch.mul),
    _quantized.mul_relu: _binary(torch.mul, relu=True),
    _quantized.matmul: _binary(torch.matmul),
    _quantized.cat: _cat(),
    _quantized.cat_relu: _cat(relu=True),
    _quantized.hardswish: _unary(F.hardswish),
    _quantized.sigmoid: _unary(torch.sigmoid),
    _quantized.relu6: _unary(F.relu6),
    _quantized.leaky_relu: _parameterized(F.leaky_relu),
    _quantized.prelu: _parameterized(F.prelu),
    _quantized.softmax: _parameterized(F.softmax),
    _quantized.dropout: _dropout,
    _quantized.elu: _scaled_unary(F.elu),
    _quantized.celu: _scaled_unary(F.celu),
    _quantized.layer_norm: _norm(F.layer_norm),
    _quantized.group_norm: _norm(F.group_norm),
    _quantized.instance_norm: _instance_norm,
    **{
        getattr(_quantized, f"batch_norm{dims}{suffix}"): _batch_norm(bool(suffix))
        for dims in ("", "1d", "2d", "3d")
        for suffix in ("", "_relu")
    },
    _quantized.linear: _linear_function(),
    _quantized.linear_relu: _linear_function(relu=True),
    **{
        getattr(_quantized, f"conv{dims}d{suffix}"): _conv_function(unpack, bool(suffix))
        for dims, unpack in (
            (1, _quantized.conv1d_unpack),
            (2, _quantized.conv2d_unpack),
            (3, _quantized.conv3d_unpack),
        )
        for suffix in ("", "_relu")
    },
}
