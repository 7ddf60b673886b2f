"""One spelling for each float op: modules, functions and methods become aten overloads.

``F.relu``, ``nn.ReLU``, ``torch.relu`` and ``x.relu_()`` all mean the same; the passes should see
one op. Each entry binds the arguments of one spelling by name and answers with an aten overload
and its arguments, or None to leave the call as it is. Anything not listed is left as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

aten = torch.ops.aten

#: An overload with its arguments.
Call = tuple[Any, tuple[Any, ...]]
Rule = Callable[..., Call | None]

#: The overload that stands for "returns its input".
IDENTITY = aten.alias.default

_FUNCTIONS: dict[object, Rule] = {}

# Functions of packages that need not be installed, by qualified name.
_BY_NAME: dict[str, Rule] = {}

#: Methods that are spelled like a function: ``x.relu()`` is ``torch.relu(x)``.
METHODS: dict[str, Any] = {
    "add": torch.add,
    "clamp": torch.clamp,
    "clamp_max": torch.clamp_max,
    "clamp_min": torch.clamp_min,
    "clip": torch.clamp,
    "contiguous": IDENTITY,
    "detach": IDENTITY,
    "div": torch.div,
    "hardshrink": F.hardshrink,
    "mean": torch.mean,
    "mul": torch.mul,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "sub": torch.sub,
    "tanh": torch.tanh,
    **{
        name: getattr(torch, name)
        for name in ("abs", "erf", "exp", "log", "neg", "reciprocal", "rsqrt", "sqrt", "square")
    },
}


def normalized(target: object, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """The canonical form of a function call, or None when there is none."""
    rule = _FUNCTIONS.get(target)
    if rule is None and callable(target):
        name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
        rule = _BY_NAME.get(name)
    return None if rule is None else rule(*args, **kwargs)


def _rule(*spellings: object) -> Callable[[Rule], Rule]:
    def decorate(rule: Rule) -> Rule:
        _FUNCTIONS.update(dict.fromkeys(spellings, rule))
        return rule

    return decorate


def _list(value: Any, dims: int) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value] * dims


# --- identities ------------------------------------------------------------------------------


@_rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Call | None:
    return None if training else (IDENTITY, (x,))


@_rule(IDENTITY, torch.detach)
def _identity(x: Any, *_: Any, **__: Any) -> Call:
    return IDENTITY, (x,)


def _stochastic_depth(x: Any, p: float, mode: str, training: bool = True) -> Call | None:
    return None if training else (IDENTITY, (x,))


_BY_NAME["torchvision.ops.stochastic_depth.stochastic_depth"] = _stochastic_depth

# --- unary functions -------------------------------------------------------------------------


def _plain_unary(overload: Any) -> Rule:
    def rule(x: Any, inplace: bool = False) -> Call:
        return overload, (x,)

    return rule


_PLAIN_UNARY: dict[Any, tuple[object, ...]] = {
    aten.abs.default: (torch.abs, operator.abs),
    aten.erf.default: (torch.erf,),
    aten.exp.default: (torch.exp,),
    aten.hardsigmoid.default: (F.hardsigmoid,),
    aten.hardswish.default: (F.hardswish,),
    aten.log.default: (torch.log,),
    aten.log_sigmoid.default: (F.logsigmoid,),
    aten.mish.default: (F.mish,),
    aten.neg.default: (torch.neg, operator.neg),
    aten.reciprocal.default: (torch.reciprocal,),
    aten.rsqrt.default: (torch.rsqrt,),
    aten.selu.default: (F.selu, torch.selu),
    aten.sigmoid.default: (torch.sigmoid, F.sigmoid),
    aten.silu.default: (F.silu,),
    aten.sqrt.default: (torch.sqrt,),
    aten.square.default: (torch.square,),
    aten.tanh.default: (torch.tanh, F.tanh),
}
for _overload, _spellings in _PLAIN_UNARY.items():
    _rule(_overload, *_spellings)(_plain_unary(_overload))


@_rule(F.relu, torch.relu, aten.relu.default)
def _relu(input: Any, inplace: bool = False) -> Call:
    return aten.clamp.default, (input, 0.0, None)


@_rule(F.relu6, aten.relu6.default)
def _relu6(input: Any, inplace: bool = False) -> Call:
    return aten.clamp.default, (input, 0.0, 6.0)


@_rule(F.hardtanh, aten.hardtanh.default)
def _hardtanh(
    input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Call:
    return aten.clamp.default, (input, min_val, max_val)


@_rule(torch.clamp, torch.clip, aten.clamp.default)
def _clamp(input: Any, min: Any = None, max: Any = None) -> Call | None:
    if all(value is None or isinstance(value, (int, float)) for value in (min, max)):
        return aten.clamp.default, (input, min, max)
    return None


@_rule(torch.clamp_min)
def _clamp_min(input: Any, min: Any) -> Call | None:
    return _clamp(input, min, None)


@_rule(torch.clamp_max)
def _clamp_max(input: Any, max: Any) -> Call | None:
    return _clamp(input, None, max)


@_rule(F.elu, aten.elu.default)
def _elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Call:
    return aten.elu.default, (input, alpha)


@_rule(F.celu, torch.celu, aten.celu.default)
def _celu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Call:
    return aten.celu.default, (input, alpha)


@_rule(F.leaky_relu, aten.leaky_relu.default)
def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Call:
    return aten.leaky_relu.default, (input, negative_slope)


@_rule(F.gelu, aten.gelu.default)
def _gelu(input: Any, approximate: str = "none") -> Call:
    # ``approximate`` is keyword-only in aten: the caller passes trailing dicts as keywords.
    return aten.gelu.default, (input, {"approximate": approximate})


@_rule(F.softplus, aten.softplus.default)
def _softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Call:
    return aten.softplus.default, (input, beta, threshold)


@_rule(F.hardshrink, torch.hardshrink)
def _hardshrink(input: Any, lambd: float = 0.5) -> Call:
    return aten.hardshrink.default, (input, lambd)


@_rule(F.prelu, torch.prelu, aten.prelu.default)
def _prelu(input: Any, weight: Any) -> Call:
    return aten.prelu.default, (input, weight)


#: Overloads that act on each element alone, given that their other arguments are constants.
UNARY: frozenset[object] = frozenset(
    {
        *_PLAIN_UNARY,
        aten.clamp.default,
        aten.elu.default,
        aten.celu.default,
        aten.leaky_relu.default,
        aten.gelu.default,
        aten.softplus.default,
        aten.hardshrink.default,
        aten.prelu.default,
        aten.add.Scalar,
        aten.sub.Scalar,
        aten.mul.Scalar,
        aten.div.Scalar,
    }
)

# --- two operands ----------------------------------------------------------------------------


def _binary(name: str, commutes: bool) -> Rule:
    packet = getattr(aten, name)

    def rule(a: Any, b: Any, alpha: Any = 1, rounding_mode: Any = None) -> Call | None:
        if alpha != 1 or rounding_mode is not None:
            return None
        numbers = [isinstance(value, (int, float)) for value in (a, b)]
        if not any(numbers):
            return packet.Tensor, (a, b)
        if numbers[0] and not commutes:
            return None
        return packet.Scalar, ((b, a) if numbers[0] else (a, b))

    return rule


for _name, _commutes in (("add", True), ("mul", True), ("sub", False), ("div", False)):
    _rule(
        getattr(torch, _name),
        getattr(operator, "truediv" if _name == "div" else _name),
        getattr(operator, "itruediv" if _name == "div" else f"i{_name}"),
        getattr(aten, _name).Tensor,
    )(_binary(_name, _commutes))


@_rule(torch.cat, torch.concat, torch.concatenate, aten.cat.default)
def _cat(tensors: Any, dim: int = 0) -> Call | None:
    return (aten.cat.default, (list(tensors), dim)) if isinstance(tensors, (tuple, list)) else None


# --- convolution and linear ------------------------------------------------------------------


def _convolution(dims: int) -> Rule:
    def rule(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Call | None:
        if isinstance(padding, str):
            if padding != "valid":
                return None
            padding = 0
        sizes = [_list(value, dims) for value in (stride, padding, dilation)]
        return aten.convolution.default, (input, weight, bias, *sizes, False, [0] * dims, groups)

    return rule


def _transposed_convolution(dims: int) -> Rule:
    def rule(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Call:
        sizes = [_list(value, dims) for value in (stride, padding, dilation)]
        more = _list(output_padding, dims)
        return aten.convolution.default, (input, weight, bias, *sizes, True, more, groups)

    return rule


for _dims in (1, 2, 3):
    _rule(getattr(F, f"conv{_dims}d"), getattr(aten, f"conv{_dims}d").default)(_convolution(_dims))
    _rule(getattr(F, f"conv_transpose{_dims}d"))(_transposed_convolution(_dims))


@_rule(F.linear, aten.linear.default)
def _linear(input: Any, weight: Any, bias: Any = None) -> Call:
    return aten.linear.default, (input, weight, bias)


# --- pools, norms, upsampling ----------------------------------------------------------------


def _max_pool(dims: int) -> Rule:
    overload = getattr(aten, f"max_pool{dims}d").default

    def rule(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Call | None:
        if return_indices:
            return None
        sizes = [_list(v, dims) for v in (kernel_size, stride or kernel_size, padding, dilation)]
        return overload, (input, *sizes, ceil_mode)

    return rule


def _avg_pool(dims: int) -> Rule:
    overload = getattr(aten, f"avg_pool{dims}d").default

    def rule(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Call | None:
        if divisor_override is not None:
            return None
        sizes = [_list(value, dims) for value in (kernel_size, stride or kernel_size, padding)]
        return overload, (input, *sizes, ceil_mode, count_include_pad)

    return rule


def _adaptive_avg_pool(dims: int) -> Rule:
    overload = getattr(aten, f"adaptive_avg_pool{dims}d").default

    def rule(input: Any, output_size: Any) -> Call:
        sizes = [-1 if size is None else size for size in _list(output_size, dims)]
        return overload, (input, sizes)

    return rule


for _dims in (1, 2, 3):
    _rule(
        getattr(F, f"max_pool{_dims}d"),
        getattr(torch, f"max_pool{_dims}d"),
        getattr(aten, f"max_pool{_dims}d").default,
    )(_max_pool(_dims))
    _rule(getattr(F, f"avg_pool{_dims}d"), getattr(aten, f"avg_pool{_dims}d").default)(
        _avg_pool(_dims)
    )
    _rule(
        getattr(F, f"adaptive_avg_pool{_dims}d"),
        getattr(aten, f"adaptive_avg_pool{_dims}d").default,
    )(_adaptive_avg_pool(_dims))


@_rule(torch.mean, aten.mean.dim)
def _mean(
    input: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: Any = None
) -> Call | None:
    dims = dim if dim is not None else axis
    if dims is None or dtype is not None:
        return None
    return aten.mean.dim, (input, _list(dims, 1), keepdim)


@_rule(F.batch_norm)
def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call | None:
    if training or running_mean is None:
        return None
    arguments = (input, weight, bias, running_mean, running_var, False, momentum, eps, False)
    return aten.batch_norm.default, arguments


@_rule(F.layer_norm)
def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Call:
    return aten.layer_norm.default, (input, list(normalized_shape), weight, bias, eps)


@_rule(F.interpolate, F.upsample)
def _interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Call | None:
    if recompute_scale_factor or antialias:
        return None
    return F.interpolate, (input, size, scale_factor, mode, align_corners)


# --- modules ---------------------------------------------------------------------------------


def _attributes(function: object, *names: str) -> Callable[[Any], tuple[object, dict[str, Any]]]:
    return lambda module: (function, {name: getattr(module, name) for name in names})


def _batch_norm_module(module: Any) -> tuple[object, dict[str, Any]]:
    names = ("running_mean", "running_var", "weight", "bias", "eps")
    return F.batch_norm, {
        **{name: getattr(module, name) for name in names},
        "training": module.training or module.running_mean is None,
    }


_POOL = ("kernel_size", "stride", "padding", "ceil_mode")

#: How a module is spelled as a function: (function, keyword arguments); tensors become constants.
MODULES: dict[type[nn.Module], Callable[[Any], tuple[object, dict[str, Any]]]] = {
    nn.Identity: _attributes(IDENTITY),
    nn.ReLU: _attributes(F.relu),
    nn.ReLU6: _attributes(F.relu6),
    nn.Hardtanh: _attributes(F.hardtanh, "min_val", "max_val"),
    nn.Hardswish: _attributes(F.hardswish),
    nn.Hardsigmoid: _attributes(F.hardsigmoid),
    nn.Sigmoid: _attributes(torch.sigmoid),
    nn.SiLU: _attributes(F.silu),
    nn.Mish: _attributes(F.mish),
    nn.GELU: _attributes(F.gelu, "approximate"),
    nn.Tanh: _attributes(torch.tanh),
    nn.ELU: _attributes(F.elu, "alpha"),
    nn.CELU: _attributes(F.celu, "alpha"),
    nn.SELU: _attributes(F.selu),
    nn.LeakyReLU: _attributes(F.leaky_relu, "negative_slope"),
    nn.LogSigmoid: _attributes(F.logsigmoid),
    nn.Softplus: _attributes(F.softplus, "beta", "threshold"),
    nn.Hardshrink: _attributes(F.hardshrink, "lambd"),
    nn.PReLU: _attributes(F.prelu, "weight"),
    nn.Flatten: _attributes(torch.flatten, "start_dim", "end_dim"),
    nn.PixelShuffle: _attributes(F.pixel_shuffle, "upscale_factor"),
    nn.PixelUnshuffle: _attributes(F.pixel_unshuffle, "downscale_factor"),
    nn.LayerNorm: _attributes(F.layer_norm, "normalized_shape", "weight", "bias", "eps"),
    nn.AvgPool1d: _attributes(F.avg_pool1d, *_POOL, "count_include_pad"),
    nn.AvgPool2d: _attributes(F.avg_pool2d, *_POOL, "count_include_pad", "divisor_override"),
    nn.AvgPool3d: _attributes(F.avg_pool3d, *_POOL, "count_include_pad", "divisor_override"),
    nn.Upsample: _attributes(F.interpolate, "size", "scale_factor", "mode", "align_corners"),
    **{
        kind: _attributes(function, "p", "training")
        for kind, function in (
            (nn.Dropout, F.dropout),
            (nn.Dropout1d, F.dropout1d),
            (nn.Dropout2d, F.dropout2d),
            (nn.Dropout3d, F.dropout3d),
            (nn.AlphaDropout, F.alpha_dropout),
        )
    },
    **{
        kind: _attributes(function, *_POOL, "dilation", "return_indices")
        for kind, function in (
            (nn.MaxPool1d, F.max_pool1d),
            (nn.MaxPool2d, F.max_pool2d),
            (nn.MaxPool3d, F.max_pool3d),
        )
    },
    **{
        kind: _attributes(function, "output_size")
        for kind, function in (
            (nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d),
            (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d),
            (nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d),
        )
    },
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm_module),
}
