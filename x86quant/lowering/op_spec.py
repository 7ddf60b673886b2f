"""What must hold of a call of an x86quant op before anything relies on it.

Every argument is there and of its type, scales and zero points mean something, weights and tables
fit. The runtime relies on it without looking: what is read from a file is held against it, and the
tests hold it against every graph after each pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.lowering.graph_tools import attribute, op_name, own_call
from x86quant.ops.dynamic import ACTIVATIONS
from x86quant.ops.float_conv import check_functions
from x86quant.ops.groups import check_groups
from x86quant.weight_form import has_groups

#: Finds the tensor behind a ``get_attr`` node; None for any other argument.
Constant = Callable[[object], torch.Tensor | None]

_MAX_INT = 1 << 31

#: Operands that the runtime packs or looks up when it plans, so they must be constants.
_CONSTANTS: dict[str, tuple[str, ...]] = {
    "affine": ("scale", "shift", "lut"),
    "add": ("lut",),
    "conv": ("weight", "weight_scales", "bias", "lut", "slopes"),
    "conv_real": ("weight", "weight_scale", "bias"),
    "float_conv": ("weight", "bias"),
    "float_conv_codes": ("weight", "bias"),
    "group_norm": ("weight", "bias", "lut"),
    "layer_norm": ("weight", "bias"),
    "linear": ("weight", "weight_scales", "bias", "lut", "slopes"),
    "linear_dynamic": ("weight", "weight_scale", "bias"),
    "linear_real": ("weight", "weight_scale", "bias"),
    "linear_weight_only": ("weight", "weight_scale", "bias"),
    "lut": ("table",),
    "lut_real": ("table",),
    "mul": ("lut",),
}

#: The least value of each number of these arguments.
_LEAST = {
    "kernel_size": 1, "stride": 1, "dilation": 1, "groups": 1, "padding": 0, "output_padding": 0,
    "output_size": -1, "size": 1, "scale_factor": 0, "eps": 0,
}  # fmt: skip

#: Arguments that files of earlier versions lack: they have their defaults there.
_LATER = frozenset({"contiguous", "slopes"})

#: Arguments whose numbers a graph may compute from sizes.
_OF_SIZES = frozenset({"after", "before", "size"})

#: Ops without qparams of their own whose result is codes all the same.
_KEEP_CODES = frozenset({"adaptive_max_pool", "lut", "max_pool", "pad"})


def yields_codes(node: Node) -> bool:
    """Whether the x86quant op that ``node`` calls returns uint8 codes."""
    return op_name(node) in _KEEP_CODES or "out_scale" in node.kwargs


def check_op(node: Node, constant: Constant) -> None:
    """Hold the x86quant op ``node``, as a file spells it, against what the runtime expects.

    Raises:
        UnsupportedError: it is called otherwise.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    arguments = {a.name: str(a.type) for a in schema}
    later = {a.name: a.default_value for a in schema if a.name in _LATER}
    node.kwargs = {**later, **node.kwargs}
    if node.args or node.kwargs.keys() != arguments.keys():
        raise UnsupportedError(f"it must be given {', '.join(arguments)}, each by name")
    _check_call(node.target, node.kwargs, constant)


def check_graph(gm: GraphModule) -> None:
    """Hold a graph of x86quant ops, in any spelling, against what the runtime expects.

    Raises:
        UnsupportedError: it is not such a graph; names the node.
        RuntimeError: it is no graph: what is used comes later, or from elsewhere.
    """
    gm.graph.lint()
    for node in gm.graph.nodes:
        call = own_call(node)
        if call is None:
            continue
        try:
            _check_call(*call, lambda value: _constant_in(gm, value))
        except UnsupportedError as error:
            raise UnsupportedError(f"{node.format_node()}: {error}") from error


def _constant_in(gm: GraphModule, value: object) -> torch.Tensor | None:
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    found = attribute(gm, str(value.target))
    return found if isinstance(found, torch.Tensor) else None


def _check_call(
    target: torch._ops.OpOverload, kwargs: Mapping[str, Any], constant: Constant
) -> None:
    for argument in target._schema.arguments:
        name, kind = argument.name, str(argument.type)
        if name not in kwargs:
            raise UnsupportedError(f"its argument {name} is missing")
        if not _is_a(kind, kwargs[name], sizes=name in _OF_SIZES):
            raise UnsupportedError(
                f"its argument {name} must be {kind}, and is {kwargs[name]!s:.80}"
            )
        _check_value(name, kwargs[name])
    op = target._schema.name.partition("::")[2]
    for name in _CONSTANTS.get(op, ()):
        if kwargs[name] is not None and constant(kwargs[name]) is None:
            raise UnsupportedError(f"its argument {name} must be a constant tensor")
    _check_clamp(kwargs)
    found = {name: constant(value) for name, value in kwargs.items()}
    if op in _WITH_TENSORS:
        _WITH_TENSORS[op](kwargs, found)
    for name in ("lut", "table"):
        _check_table(found.get(name), torch.float32 if op == "lut_real" else torch.uint8)


# --- single arguments ------------------------------------------------------------------------


def _is_a(kind: str, value: Any, sizes: bool = False) -> bool:
    if kind.startswith("Optional["):
        return value is None or _is_a(kind[len("Optional[") : -1], value, sizes)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return isinstance(value, list | tuple) and all(_is_a(inner, v, sizes) for v in value)
    if kind == "Tensor":
        return isinstance(value, Node)
    if kind == "float":
        return type(value) in (int, float)
    if kind == "int":
        return (type(value) is int and abs(value) < _MAX_INT) or (sizes and isinstance(value, Node))
    return type(value) is {"bool": bool, "str": str}[kind]


def _check_value(name: str, value: Any) -> None:
    """Scales are positive and finite, zero points are codes, sizes are sizes, whatever the op."""
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, Node) or part is None:
            continue
        if name.endswith(("scale", "scales")) and not isinstance(part, bool):
            # upsample's scale_factor ends otherwise, and is a factor.
            if not (math.isfinite(part) and part > 0):
                raise UnsupportedError(f"its {name} is {part}, and a scale is positive and finite")
        elif name.endswith(("_zp", "_zps")) and not 0 <= part <= 255:
            raise UnsupportedError(f"its {name} is {part}, and a zero point is in 0..255")
        elif name in _LEAST and not (math.isfinite(part) and part >= _LEAST[name]):
            raise UnsupportedError(f"its {name} is {part}, and must be at least {_LEAST[name]}")


def _check_clamp(kwargs: Mapping[str, Any]) -> None:
    if "lo" in kwargs and not 0 <= kwargs["lo"] <= kwargs["hi"] <= 255:
        raise UnsupportedError(
            f"it clamps to {kwargs['lo']}..{kwargs['hi']}, which is not a range within 0..255"
        )


def _check_table(table: torch.Tensor | None, dtype: torch.dtype) -> None:
    if table is not None and (table.dtype != dtype or table.shape != (256,)):
        values = "uint8 codes" if dtype == torch.uint8 else "floats"
        raise UnsupportedError(
            f"its table is {table.dtype} {tuple(table.shape)}, and a table is 256 {values}"
        )


# --- constant operands -----------------------------------------------------------------------

_Found = dict[str, torch.Tensor | None]


def _check_linear(kwargs: Mapping[str, Any], found: _Found) -> None:
    weight = _weight(found)
    if weight.dim() != 2:
        raise UnsupportedError(
            f"its weight has shape {tuple(weight.shape)}, and needs two dimensions"
        )
    _check_channels(found, weight.shape[0])


def _check_float_linear(kwargs: Mapping[str, Any], found: _Found) -> None:
    scale = found["weight_scale"]
    if scale is not None and has_groups(scale):
        _check_groups(found["weight"], scale)
        _check_floats("bias", found["bias"], (scale.shape[0],))
    else:
        weight = _weight(found)
        if weight.dim() != 2:
            raise UnsupportedError(
                f"its weight has shape {tuple(weight.shape)}, and needs two dimensions"
            )
        _check_positive_scales(found, weight.shape[0])
    _check_activation(kwargs)


def _check_positive_scales(found: _Found, channels: int) -> None:
    """Of a product that gives floats, one a channel, and its bias."""
    for name in ("weight_scale", "bias"):
        _check_floats(name, found[name], (channels,))
    scale = found["weight_scale"]
    if scale is None or not bool((scale > 0).all()):
        raise UnsupportedError("its weight_scale holds what is not positive")


def _check_activation(kwargs: Mapping[str, Any]) -> None:
    if kwargs["activation"] is not None and kwargs["activation"] not in ACTIVATIONS:
        raise UnsupportedError(f"its activation {kwargs['activation'][:80]!r} is not known")


def _check_groups(weight: torch.Tensor | None, scale: torch.Tensor) -> None:
    if weight is None:
        raise UnsupportedError("it has no weight")
    try:
        check_groups("linear", weight, scale)
    except InvalidInputError as error:
        raise UnsupportedError(str(error)) from error
    if not bool(torch.isfinite(scale).all()):
        raise UnsupportedError("its weight_scale holds NaN or infinity")


def _check_conv_real(kwargs: Mapping[str, Any], found: _Found) -> None:
    weight = _conv_weight(kwargs, found, "stride", "padding", "dilation")
    _check_positive_scales(found, weight.shape[0])
    _check_activation(kwargs)


def _conv_weight(kwargs: Mapping[str, Any], found: _Found, *numbers: str) -> torch.Tensor:
    """The weight of a convolution that has ``numbers`` for each of its one to three dimensions."""
    weight = _weight(found)
    _check_window(kwargs, weight, *numbers)
    return weight


def _check_window(kwargs: Mapping[str, Any], weight: torch.Tensor, *numbers: str) -> None:
    dims = weight.dim() - 2
    if dims not in (1, 2, 3) or not all(weight.shape):
        raise UnsupportedError(f"its weight has the impossible shape {tuple(weight.shape)}")
    for name in numbers:
        if len(kwargs[name]) != dims:
            raise UnsupportedError(f"its {name} must be {dims} numbers")


def _check_float_conv(kwargs: Mapping[str, Any], found: _Found) -> None:
    weight, groups = found["weight"], kwargs["groups"]
    if weight is None or weight.dtype != torch.float32:
        raise UnsupportedError(f"its weight must be float32, not {getattr(weight, 'dtype', None)}")
    _check_window(kwargs, weight, "stride", "padding", "dilation")
    if groups != 1 and tuple(weight.shape[:2]) != (groups, 1):
        raise UnsupportedError(f"its weight {tuple(weight.shape)} is not that of {groups} groups")
    _check_floats("bias", found["bias"], (weight.shape[0],))
    try:
        check_functions(kwargs["functions"], kwargs["numbers"])
    except InvalidInputError as error:
        raise UnsupportedError(str(error)) from error


def _check_conv(kwargs: Mapping[str, Any], found: _Found) -> None:
    weight = _conv_weight(kwargs, found, "stride", "padding", "dilation", "output_padding")
    groups = kwargs["groups"]
    if weight.shape[0] % groups:
        raise UnsupportedError(f"its {weight.shape[0]} channels do not fall into {groups} groups")
    _check_channels(found, weight.shape[1] * groups if kwargs["transposed"] else weight.shape[0])


def _weight(found: _Found) -> torch.Tensor:
    weight = found["weight"]
    if weight is None or weight.dtype != torch.int8:
        raise UnsupportedError(f"its weight must be int8, not {getattr(weight, 'dtype', None)}")
    return weight


def _check_channels(found: _Found, channels: int) -> None:
    scales, bias = found["weight_scales"], found["bias"]
    _check_floats("slopes", found["slopes"], (channels,))
    _check_floats("weight_scales", scales, (1, channels))
    if scales is not None and not bool((scales >= 0).all()):
        raise UnsupportedError("its weight_scales hold negative numbers")
    if bias is not None and bias.dtype == torch.int32:
        if bias.shape != (channels,):
            raise UnsupportedError(f"its bias must have {channels} elements, one a channel")
    else:
        _check_floats("bias", bias, (channels,))


def _check_floats(name: str, tensor: torch.Tensor | None, lengths: tuple[int, ...]) -> None:
    """A tensor of finite floats of one dimension, of one of ``lengths``."""
    if tensor is None:
        return
    if tensor.dtype != torch.float32 or tensor.dim() != 1 or tensor.shape[0] not in lengths:
        raise UnsupportedError(
            f"its {name} must be float32 of length {' or '.join(map(str, lengths))}, "
            f"and is {tensor.dtype} {tuple(tensor.shape)}"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise UnsupportedError(f"its {name} holds NaN or infinity")


def _check_affine(kwargs: Mapping[str, Any], found: _Found) -> None:
    for name in ("scale", "shift"):
        tensor = found[name]
        _check_floats(name, tensor, () if tensor is None else (tensor.numel(),))


def _check_layer_norm(kwargs: Mapping[str, Any], found: _Found) -> None:
    for name in ("weight", "bias"):
        tensor = found[name]
        _check_floats(name, tensor, () if tensor is None else (tensor.numel(),))


_WITH_TENSORS: dict[str, Callable[[Mapping[str, Any], _Found], None]] = {
    "affine": _check_affine,
    "conv": _check_conv,
    "conv_real": _check_conv_real,
    "float_conv": _check_float_conv,
    "float_conv_codes": _check_float_conv,
    "group_norm": _check_layer_norm,
    "layer_norm": _check_layer_norm,
    "linear": _check_linear,
    "linear_dynamic": _check_float_linear,
    "linear_real": _check_float_linear,
    "linear_weight_only": _check_float_linear,
}
