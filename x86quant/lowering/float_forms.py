"""What modules and functions that are not plain float code mean in float.

Ours are here; those of stock PyTorch are in ``stock_layers``, which is imported when a model has
one: torch.ao may be missing otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from x86quant.lowering.builder import (
    Builder,
    FunctionConverter,
    ModuleConverter,
    convolution,
    linear,
)
from x86quant.lowering.graph_tools import dequantized, emit, op
from x86quant.lowering.normalize import IDENTITY
from x86quant.lowering.rounded import (
    FusedLayer,
    RoundedLayer,
    RoundedRecurrent,
    rounded,
    rounded_weight,
)

aten = torch.ops.aten


#: Functions of torch that make or read quantized tensors.
_STOCK_FUNCTIONS = ("quantize_per_tensor", "quantize_per_channel", "dequantize")


def module_converter(module: nn.Module) -> ModuleConverter | None:
    """What emits a call of ``module``; None if it is float code."""
    if is_quantized_module(module):
        from x86quant.lowering import stock_layers

        return stock_layers.MODULES.get(type(module))
    return _MODULES.get(type(module))


def function_converter(target: object) -> FunctionConverter | None:
    """What emits a call of ``target``; None if it is float code."""
    if is_quantized_op(target) or target in _stock_functions():
        from x86quant.lowering import stock_layers

        return stock_layers.FUNCTIONS.get(target)
    return _FUNCTIONS.get(target)


def is_fused(module: nn.Module) -> bool:
    """Whether ``module`` is a layer followed by something, as a plain sequence."""
    if is_quantized_module(module):
        from x86quant.lowering import stock_layers

        return type(module) in stock_layers.FUSED
    return type(module) is FusedLayer


def is_quantized_op(target: object) -> bool:
    """Whether ``target`` is an op of torch's ``quantized`` namespace."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target).startswith("quantized.")
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "quantized"


def is_quantized_module(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's quantized modules."""
    return type(module).__module__.startswith("torch.ao.nn")


def _stock_functions() -> tuple[object, ...]:
    return tuple(getattr(torch, name) for name in _STOCK_FUNCTIONS if hasattr(torch, name))


# --- convolution and linear ------------------------------------------------------------------


# --- ours ------------------------------------------------------------------------------------


def _rounded_layer(builder: Builder, path: str, module: RoundedLayer, x: Any) -> Any:
    layer: Any = module.layer
    if isinstance(layer, nn.Linear):
        return linear(builder, path, x, module.weight, layer.bias)
    return convolution(builder, path, layer, x, module.weight, layer.bias)


def _rounded_recurrent(
    builder: Builder, path: str, module: RoundedRecurrent, x: Any, h: Any = None, c: Any = None
) -> Any:
    codes = dequantized(x)
    assert codes is not None  # its input is rounded to the module's own codes
    constants = {
        "weights": [weight.codes for weight in module.weights],
        "scales": [weight.scales for weight in module.weights],
        "biases": module.biases,
    }
    given = {
        name: [builder.constant_once(f"{path}_{name}", x) for x in tensors]
        for name, tensors in constants.items()
    }
    scale, zero_point = module.h_qparams
    arguments = {"x": codes, **given, **module.arguments(), "h": h, "c": c}
    if not module.returns_last:
        out = emit(builder.graph, "recurrent", **arguments)
        return emit(builder.graph, "dequantize", x=out, x_scale=scale, x_zp=zero_point)
    both = emit(builder.graph, "recurrent_last", **arguments)
    out, last = (builder.graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
    out.meta["qparams"] = both.meta.pop("qparams")
    return emit(builder.graph, "dequantize", x=out, x_scale=scale, x_zp=zero_point), last


def recurrent_graph(module: RoundedRecurrent, states: Sequence[str] = ()) -> GraphModule:
    """``module`` as a graph of its own, lowered; it takes x, and the initial ``states`` named."""
    builder = Builder()
    x, *given = (builder.graph.placeholder(name) for name in ("x", *states))
    codes = _rounded(builder, x, x, *module.x_qparams)
    named = dict(zip(states, given, strict=True))
    builder.graph.output(_rounded_recurrent(builder, "layer", module, codes, **named))
    builder.graph.eliminate_dead_code()
    return GraphModule(builder.root, builder.graph).eval()


def _rounded(builder: Builder, node: Node, x: Any, scale: float, zero_point: int) -> Any:
    codes = emit(builder.graph, "quantize", x=x, out_scale=scale, out_zp=zero_point)
    return emit(builder.graph, "dequantize", x=codes, x_scale=scale, x_zp=zero_point)


def _rounded_weight(builder: Builder, node: Node, codes: Any, scales: Any, axis: int) -> Any:
    return emit(builder.graph, "dequantize_weight", weight=codes, weight_scales=scales, axis=axis)


def _own(name: str) -> FunctionConverter:
    """An op of ours, which int8 modules call: the same with its arguments by name."""

    def convert(builder: Builder, node: Node, *args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in op(name)._schema.arguments]
        return emit(builder.graph, name, **dict(zip(names, args, strict=False)), **kwargs)

    return convert


_MODULES: dict[type[nn.Module], ModuleConverter] = {
    RoundedLayer: _rounded_layer,
    RoundedRecurrent: _rounded_recurrent,
}

_FUNCTIONS: dict[object, FunctionConverter] = {
    **{
        target: _own(name)
        for name in ("linear_dynamic", "linear_weight_only")
        for target in (getattr(torch.ops.x86quant, name), op(name))
    },
    rounded: _rounded,
    rounded_weight: _rounded_weight,
    IDENTITY: lambda builder, node, x: x,
}
