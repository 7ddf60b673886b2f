"""Operators that work element by element."""

from __future__ import annotations

import functools
import math
from operator import add
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from x86quant.onnx_models.element_types import torch_dtype
from x86quant.onnx_models.operator_table import operator, type_lacks

_PLAIN: dict[str, Any] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.det,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": F.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
for _name, _function in _PLAIN.items():
    operator(_name)(_function)

#: Of two inputs, either of which may be a number.
_BINARY: dict[str, Any] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}
#: Those that take no numbers.
_LOGICAL = ("And", "Or", "Xor")
#: Those of which versions before 7 were broadcast by attributes.
_SINCE_7 = (*_LOGICAL, "Add", "Equal", "Greater", "Less", "Mul", "Sub")
for _name, _function in _BINARY.items():
    operator(
        _name,
        scalars=() if _name in _LOGICAL else (1,),
        oldest=7 if _name in _SINCE_7 else 1,
    )(_function)
#: Those that PyTorch does not know for unsigned integers of more than 8 bits.
SIGNED_ONLY = frozenset(
    {"Abs", "Add", "BitwiseNot", "Clip", "Div", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
    | {"Max", "Min", "Mod", "Mul", "Neg", "Pow", "Sign", "Sub", "Sum"}
)


@operator("Identity")
def identity(x: Any) -> Any:
    """``x`` itself."""
    return x


@operator("Div", scalars=(1,), oldest=7)
def div(x: Any, y: Any) -> Any:
    """The quotient, rounded towards zero for integers."""
    if x.is_floating_point():
        return torch.div(x, y)
    return torch.div(x, y, rounding_mode="trunc")


@operator("Mod", scalars=(1,))
def mod(x: Any, y: Any, *, fmod: int) -> Any:
    """The rest: of the sign of ``y``, or with ``fmod`` of the sign of ``x``."""
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


@operator("Pow", scalars=(1,), oldest=7)
def power(x: Any, y: Any) -> Any:
    """``x`` to the power of ``y``, in the type of ``x``."""
    if isinstance(y, int | float):
        if y == 0.5 and x.is_floating_point():
            return torch.sqrt(x)
        y = int(y) if y == int(y) else y
        return torch.pow(x, y) if x.is_floating_point() else torch.pow(x, y).to(x.dtype)
    return torch.pow(x, y).to(x.dtype)


@operator("BitShift")
def bit_shift(x: Any, y: Any, *, direction: str) -> Any:
    """Bits moved to the left or right; ``x`` is not negative."""
    shift = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    return shift(x.to(torch.int64), y.to(torch.int64)).to(x.dtype)


@operator("Max", oldest=8)
def maximum(*xs: Any) -> Any:
    """The greatest of all inputs."""
    return functools.reduce(torch.maximum, xs)


@operator("Min", oldest=8)
def minimum(*xs: Any) -> Any:
    """The least of all inputs."""
    return functools.reduce(torch.minimum, xs)


@operator("Sum", oldest=8)
def sum_of(*xs: Any) -> Any:
    """The sum of all inputs."""
    return functools.reduce(add, xs)


@operator("Mean", oldest=8)
def mean_of(*xs: Any) -> Any:
    """The mean of all inputs."""
    return sum_of(*xs) / len(xs)


@operator("Clip", scalars=(1, 2))
def clip(x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    """``x`` within bounds, which are inputs since version 11 and attributes before."""
    low, high = min if low is None else low, max if high is None else high
    if low is None and high is None:
        return x
    if isinstance(low, int | float | None) and isinstance(high, int | float | None):
        if low == 0 and high == 6 and x.is_floating_point():
            return F.relu6(x)
        if low == 0 and high is None:
            return F.relu(x)
        if high is None or low is None or low <= high:
            if low is not None and high is not None:
                return torch.clamp(x, low, high)
            return torch.clamp(x, min=low) if high is None else torch.clamp(x, max=high)
    if low is not None:
        x = torch.clamp(x, min=low)
    return x if high is None else torch.clamp(x, max=high)


@operator("LeakyRelu")
def leaky_relu(x: Any, *, alpha: float) -> Any:
    """Negative values times ``alpha``."""
    return F.leaky_relu(x, alpha)


@operator("PRelu", oldest=7)
def prelu(x: Any, slope: Any) -> Any:
    """Negative values times ``slope``, which is broadcast."""
    return torch.where(x < 0, x * slope, x)


@operator("Elu")
def elu(x: Any, *, alpha: float) -> Any:
    """The exponential linear unit."""
    return F.elu(x, alpha)


@operator("Selu")
def selu(x: Any, *, alpha: float, gamma: float) -> Any:
    """The scaled exponential linear unit."""
    return gamma * F.elu(x, alpha)


@operator("Celu")
def celu(x: Any, *, alpha: float) -> Any:
    """The continuously differentiable exponential linear unit."""
    return F.celu(x, alpha)


@operator("HardSigmoid")
def hard_sigmoid(x: Any, *, alpha: float, beta: float) -> Any:
    """A line between zero and one."""
    if beta == 0.5 and abs(alpha - 1 / 6) < 1e-7:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


@operator("Softplus")
def softplus(x: Any) -> Any:
    """``log(exp(x) + 1)``."""
    return torch.logaddexp(x, torch.zeros_like(x))


@operator("Softsign")
def softsign(x: Any) -> Any:
    """``x / (1 + |x|)``."""
    return F.softsign(x)


@operator("ThresholdedRelu")
def thresholded_relu(x: Any, *, alpha: float) -> Any:
    """Zero up to ``alpha``."""
    return torch.where(x > alpha, x, torch.zeros_like(x))


@operator("Shrink")
def shrink(x: Any, *, bias: float, lambd: float) -> Any:
    """Zero near zero, moved by ``bias`` beyond."""
    zero = torch.zeros_like(x)
    inner = torch.where(x > lambd, (x - bias).to(x.dtype), zero)
    return torch.where(x < -lambd, (x + bias).to(x.dtype), inner)


@operator("Gelu")
def gelu(x: Any, *, approximate: str) -> Any:
    """The Gaussian error linear unit."""
    return F.gelu(x, approximate=approximate)


@operator("Gelu", "BiasGelu", domain="com.microsoft")
def microsoft_gelu(x: Any, bias: Any = None) -> Any:
    """The Gaussian error linear unit, of a sum."""
    return F.gelu(x if bias is None else x + bias)


@operator("FastGelu", domain="com.microsoft")
def fast_gelu(x: Any, bias: Any = None) -> Any:
    """The same by tanh."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("QuickGelu", domain="com.microsoft")
def quick_gelu(x: Any, *, alpha: float = 1.702) -> Any:
    """``x * sigmoid(alpha * x)``."""
    return x * torch.sigmoid(x * alpha)


@operator("Swish")
def swish(x: Any, *, alpha: float) -> Any:
    """``x * sigmoid(alpha * x)``."""
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(x * alpha)


@operator("IsInf")
def is_inf(x: Any, *, detect_negative: int, detect_positive: int) -> Any:
    """Where ``x`` is infinite, of the signs asked for."""
    if detect_negative and detect_positive:
        return torch.isinf(x)
    infinite = math.inf if detect_positive else -math.inf
    return x == infinite if detect_negative or detect_positive else torch.zeros_like(x) != 0


@operator("Where")
def where(condition: Any, x: Any, y: Any) -> Any:
    """``x`` where the condition holds, else ``y``."""
    return torch.where(condition, x, y)


@operator("Dropout", returns_tuple=True)
def dropout(
    x: Any,
    share: Any = None,
    training: Any = None,
    *,
    ratio: float = 0.5,
    seed: int = 0,
    outputs: int,
) -> Any:
    """``x``: nothing is dropped outside of training, which is refused."""
    return (x,) if outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))


@operator("Cast", oldest=6, lacks=type_lacks)
def cast(x: Any, *, to: int) -> Any:
    """``x`` in another type."""
    return x.to(torch_dtype(to, "the result of a cast"))


@operator("CastLike")
def cast_like(x: Any, like: Any) -> Any:
    """``x`` in the type of another tensor."""
    return x.to(like.dtype)
