"""One spelling for each float op: modules, functions and methods become aten overloads.

``F.relu``, ``nn.ReLU``, ``torch.relu`` and ``x.relu_()`` all mean the same; the passes should see
one op. Each rule takes the arguments of one spelling under torch's own names and answers with an
aten overload and its arguments, or with None. A call stays what it is, a torch op that runs in
float, when there is no rule for it, when the rule's parameters do not fit, when the rule answers
None, or when an argument that the rule must know (a stride, a slope) is computed at run time.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from x86quant.lowering.module_functions import MODULES

aten = torch.ops.aten

#: An overload with its arguments; a mapping at the end holds those that are keyword only.
Call = tuple[Any, tuple[Any, ...]]
Rule = Callable[..., Call | None]

#: The overload that stands for "returns its input".
IDENTITY = aten.alias.default

#: Parameters that may be, or contain, values of the graph. All others must be plain.
_VALUES = frozenset(
    {"input", "other", "weight", "bias", "running_mean", "running_var", "tensors", "size", "pad"}
)
#: The names that torch takes for the sake of numpy.
_NUMPY_NAMES = {
    "axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other",
}  # fmt: skip

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
    "divide": torch.div,
    "hardshrink": F.hardshrink,
    "amax": torch.amax,
    "mean": torch.mean,
    "mul": torch.mul,
    "multiply": torch.mul,
    "pow": torch.pow,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "sub": torch.sub,
    "subtract": torch.sub,
    "tanh": torch.tanh,
    **{
        name: getattr(torch, name)
        for name in ("abs", "erf", "exp", "log", "neg", "reciprocal", "rsqrt", "sqrt", "square")
    },
}


def normalized(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """The canonical form of a function call, or None when there is none."""
    rule = _FUNCTIONS.get(target)
    if rule is None and callable(target):
        name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"
        rule = _BY_NAME.get(name)
    return None if rule is None else _applied(rule, args, kwargs)


def normalized_node(node: Node, module: nn.Module | None) -> Call | None:
    """The canonical form of what ``node`` calls: a function, a method, or ``module``."""
    if module is not None:
        if type(module) not in MODULES:
            return None
        function, named = MODULES[type(module)](module)
        if any(isinstance(value, torch.Tensor) for value in named.values()):
            return None
        return normalized(function, node.args, {**named, **node.kwargs})
    target = METHODS.get(str(node.target)) if node.op == "call_method" else node.target
    return normalized(target, node.args, node.kwargs) if node.op.startswith("call_") else None


def _applied(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """What ``rule`` makes of these arguments, if they are ones that it knows."""
    signature = inspect.signature(rule)
    named = {
        name if name in signature.parameters else _NUMPY_NAMES.get(name, name): value
        for name, value in kwargs.items()
    }
    try:
        bound = signature.bind(*args, **named)
    except TypeError:  # another overload, or a parameter that the rule knows nothing of
        return None
    computed = any(
        isinstance(leaf, Node)
        for name, value in bound.arguments.items()
        if name not in _VALUES
        for leaf in pytree.tree_leaves(value)
    )
    # A sum or product may start with a number; anything else is about a tensor.
    first, *_ = bound.arguments.values()
    if computed or not (isinstance(first, Node | list | tuple) or "other" in bound.arguments):
        return None
    return rule(*bound.args, **bound.kwargs)


def not_canonical(target: Any) -> Any:
    """Another name for what ``target`` calls, where a pass would take it for the canonical form.

    Such is ``aten.add.Tensor`` with an alpha: it has a rule, and the rule has answered None.
    """
    if target not in _FUNCTIONS or not isinstance(target, torch._ops.OpOverload):
        return target
    return target.overloadpacket  # takes the same arguments, which torch.add does not


def _rule(*spellings: object) -> Callable[[Rule], Rule]:
    def decorate(rule: Rule) -> Rule:
        _FUNCTIONS.update(dict.fromkeys(spellings, rule))
        return rule

    return decorate


def _list(value: Any, dims: int) -> list[Any] | None:
    """``value``, one number or one for each dimension, as a list; None if it is something else."""
    if isinstance(value, int | float) or value is None:
        return [value] * dims
    found = list(value)
    return found * dims if len(found) == 1 else found if len(found) == dims else None


def _lists(dims: int, *values: Any) -> list[list[Any]] | None:
    """Each of ``values`` as a list of numbers; None if one cannot be."""
    found = [_list(value, dims) for value in values]
    return None if any(one is None for one in found) else found  # type: ignore[return-value]


# --- identities ------------------------------------------------------------------------------


@_rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def _dropout(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Call | None:
    return None if training else (IDENTITY, (input,))


@_rule(F.alpha_dropout, F.feature_alpha_dropout)
def _alpha_dropout(
    input: Any, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Call | None:
    return _dropout(input, p, training)


@_rule(torch.dropout, torch.feature_dropout, aten.dropout.default)
def _aten_dropout(input: Any, p: float, train: bool) -> Call | None:
    return _dropout(input, p, train)


@_rule(IDENTITY, torch.detach, aten.detach.default)
def _identity(input: Any, memory_format: Any = None) -> Call:
    return IDENTITY, (input,)


_BY_NAME["torchvision.ops.stochastic_depth.stochastic_depth"] = (
    lambda input, p, mode, training=True: _dropout(input, p, training)
)

# --- unary functions -------------------------------------------------------------------------


def _unary(overload: Any, parameters: Mapping[str, float]) -> Rule:
    def rule(input: Any, *given: float, **named: float) -> Call:
        values = {**parameters, **dict(zip(parameters, given, strict=False)), **named}
        return overload, (input, *(values[name] for name in parameters))

    # As torch's own: the parameters with their defaults, and behind them ``inplace``, of no effect.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = [inspect.Parameter("input", kind)]
    for name, default in {**parameters, "inplace": False}.items():
        taken.append(inspect.Parameter(name, kind, default=default))
    rule.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    return rule


#: Functions of one tensor: their numbers with the defaults, and their other spellings.
_UNARY: dict[Any, tuple[dict[str, float], tuple[object, ...]]] = {
    aten.abs.default: ({}, (torch.abs, torch.absolute, operator.abs)),
    aten.celu.default: ({"alpha": 1.0}, (F.celu, torch.celu)),
    aten.elu.default: ({"alpha": 1.0}, (F.elu,)),
    aten.erf.default: ({}, (torch.erf,)),
    aten.exp.default: ({}, (torch.exp,)),
    aten.hardshrink.default: ({"lambd": 0.5}, (F.hardshrink, torch.hardshrink)),
    aten.hardsigmoid.default: ({}, (F.hardsigmoid,)),
    aten.hardswish.default: ({}, (F.hardswish,)),
    aten.leaky_relu.default: ({"negative_slope": 0.01}, (F.leaky_relu,)),
    aten.log.default: ({}, (torch.log,)),
    aten.log_sigmoid.default: ({}, (F.logsigmoid,)),
    aten.mish.default: ({}, (F.mish,)),
    aten.neg.default: ({}, (torch.neg, torch.negative, operator.neg)),
    aten.reciprocal.default: ({}, (torch.reciprocal,)),
    aten.rsqrt.default: ({}, (torch.rsqrt,)),
    aten.selu.default: ({}, (F.selu, torch.selu)),
    aten.sigmoid.default: ({}, (torch.sigmoid, F.sigmoid, torch.special.expit)),
    aten.silu.default: ({}, (F.silu,)),
    aten.softplus.default: ({"beta": 1.0, "threshold": 20.0}, (F.softplus,)),
    aten.sqrt.default: ({}, (torch.sqrt,)),
    aten.square.default: ({}, (torch.square,)),
    aten.tanh.default: ({}, (torch.tanh, F.tanh)),
}
for _overload, (_parameters, _spellings) in _UNARY.items():
    _rule(_overload, *_spellings)(_unary(_overload, _parameters))


@_rule(F.relu, torch.relu, aten.relu.default)
def _relu(input: Any, inplace: bool = False) -> Call:
    return aten.clamp.default, (input, 0.0, None)


@_rule(F.relu6, aten.relu6.default)
def _relu6(input: Any, inplace: bool = False) -> Call:
    return aten.clamp.default, (input, 0.0, 6.0)


@_rule(F.hardtanh, aten.hardtanh.default)
def _hardtanh(
    input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Call | None:
    return _clamp(input, min_val, max_val)


@_rule(torch.clamp, torch.clip, aten.clamp.default)
def _clamp(input: Any, min: Any = None, max: Any = None) -> Call | None:
    bounds = [value for value in (min, max) if value is not None]
    if not all(isinstance(value, int | float) and not math.isnan(value) for value in bounds):
        return None
    if len(bounds) == 2 and min > max:  # torch gives max everywhere
        min = max
    # A bound at infinity is no bound, unless nothing would be left within it.
    low, high = (None if min == -math.inf else min), (None if max == math.inf else max)
    if low == math.inf or high == -math.inf:
        return None
    if low is None and high is None:
        return IDENTITY, (input,)
    return aten.clamp.default, (input, low, high)


_rule(torch.clamp_min, aten.clamp_min.default)(lambda input, min: _clamp(input, min, None))
_rule(torch.clamp_max, aten.clamp_max.default)(lambda input, max: _clamp(input, None, max))


@_rule(F.gelu, aten.gelu.default)
def _gelu(input: Any, approximate: str = "none") -> Call:
    return aten.gelu.default, (input, {"approximate": approximate})


@_rule(torch.pow, operator.pow, aten.pow.Tensor_Scalar)
def _pow(input: Any, exponent: Any) -> Call | None:
    fits = isinstance(input, Node) and isinstance(exponent, int | float)
    return (aten.pow.Tensor_Scalar, (input, exponent)) if fits else None


@_rule(F.prelu, torch.prelu, aten.prelu.default)
def _prelu(input: Any, weight: Any) -> Call:
    return aten.prelu.default, (input, weight)


_SUMS_AND_PRODUCTS = ("add", "sub", "mul", "div")

#: Overloads that act on each element alone, given that their other arguments are constants.
UNARY: frozenset[object] = frozenset(
    {
        *_UNARY,
        aten.clamp.default,
        aten.gelu.default,
        aten.prelu.default,
        aten.pow.Tensor_Scalar,
        *(getattr(aten, name).Scalar for name in _SUMS_AND_PRODUCTS),
    }
)

#: Overloads that act on two values element by element.
JOINS: frozenset[object] = frozenset(getattr(aten, name).Tensor for name in _SUMS_AND_PRODUCTS)

# --- two operands ----------------------------------------------------------------------------


def _binary(name: str, commutes: bool) -> Rule:
    packet = getattr(aten, name)

    def rule(input: Any, other: Any, *, alpha: Any = 1, rounding_mode: Any = None) -> Call | None:
        if alpha != 1 or rounding_mode is not None:
            return None
        if isinstance(input, Node) and isinstance(other, Node):
            return packet.Tensor, (input, other)
        if isinstance(input, Node):
            number, node = other, input
        else:
            number, node = input, other
        plain = isinstance(number, int | float) and isinstance(node, Node)
        if not plain or (node is other and not commutes):
            return None
        return packet.Scalar, (node, number)

    return rule


for _name, _commutes, _more in (
    ("add", True, ()),
    ("mul", True, (torch.multiply,)),
    ("sub", False, (torch.subtract,)),
    ("div", False, (torch.divide, torch.true_divide)),
):
    _rule(
        getattr(torch, _name),
        getattr(operator, "truediv" if _name == "div" else _name),
        getattr(aten, _name).Tensor,
        getattr(aten, _name).Scalar,
        *_more,
    )(_binary(_name, _commutes))


@_rule(torch.cat, torch.concat, torch.concatenate, aten.cat.default)
def _cat(tensors: Any, dim: int = 0) -> Call | None:
    nodes = isinstance(tensors, tuple | list) and all(isinstance(x, Node) for x in tensors)
    return (aten.cat.default, (list(tensors), dim)) if nodes else None


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
        if padding == "valid":
            padding = 0
        sizes = None if isinstance(padding, str) else _lists(dims, stride, padding, dilation)
        if sizes is None:
            return None
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
    ) -> Call | None:
        sizes = _lists(dims, stride, padding, dilation, output_padding)
        if sizes is None:
            return None
        *sizes, more = sizes
        return aten.convolution.default, (input, weight, bias, *sizes, True, more, groups)

    return rule


for _dims in (1, 2, 3):
    _rule(
        getattr(F, f"conv{_dims}d"),
        getattr(aten, f"conv{_dims}d").default,
        getattr(aten, f"conv{_dims}d").padding,
    )(_convolution(_dims))
    _rule(
        getattr(F, f"conv_transpose{_dims}d"),
        aten.conv_transpose1d.default
        if _dims == 1
        else getattr(aten, f"conv_transpose{_dims}d").input,
    )(_transposed_convolution(_dims))


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
        sizes = _lists(dims, kernel_size, stride or kernel_size, padding, dilation)
        if return_indices or sizes is None:
            return None
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
        sizes = _lists(dims, kernel_size, stride or kernel_size, padding)
        if divisor_override is not None or sizes is None:
            return None
        return overload, (input, *sizes, ceil_mode, count_include_pad)

    return rule


def _adaptive_avg_pool(dims: int) -> Rule:
    overload = getattr(aten, f"adaptive_avg_pool{dims}d").default

    def rule(input: Any, output_size: Any) -> Call | None:
        sizes = _list(output_size, dims)
        if sizes is None or None in sizes:  # None is the input's size
            return None
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
        getattr(torch, f"adaptive_avg_pool{_dims}d", None),
        getattr(aten, f"adaptive_avg_pool{_dims}d").default,
    )(_adaptive_avg_pool(_dims))
_FUNCTIONS.pop(None, None)


@_rule(torch.mean, aten.mean.dim)
def _mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Call | None:
    if dim is None or dtype is not None:
        return None
    dims = [dim] if isinstance(dim, int) else list(dim)
    return aten.mean.dim, (input, dims, keepdim)


@_rule(torch.amax, aten.amax.default)
def _amax(input: Any, dim: Any = (), keepdim: bool = False) -> Call | None:
    dims = [dim] if isinstance(dim, int) else list(dim)
    return (aten.amax.default, (input, dims, keepdim)) if dims else None


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


@_rule(F.layer_norm, torch.layer_norm, aten.layer_norm.default)
def _layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Call:
    return aten.layer_norm.default, (input, list(normalized_shape), weight, bias, eps)


@_rule(F.group_norm, torch.group_norm, aten.group_norm.default)
def _group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Call:
    return aten.group_norm.default, (input, num_groups, weight, bias, eps)


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


@_rule(F.pad, aten.pad.default)
def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Call | None:
    return None if isinstance(pad, Node) else (F.pad, (input, list(pad), mode, value))


@_rule(aten.constant_pad_nd.default)
def _constant_pad(input: Any, pad: Any, value: Any = 0) -> Call | None:
    return _pad(input, pad, "constant", value)
