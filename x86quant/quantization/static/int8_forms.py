"""Which steps of a float graph become int8, and where the range of their results comes from.

What is not in these tables runs in float, or is fused by lowering where it stands alone between
two int8 steps (``lowering/passes``).
"""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.fx import Node

from x86quant.quantization.tracing.recurrent_layers import LAYERS

#: Where the range of a step's results comes from: "seen" in calibration, "known" beforehand, the
#: "input" it only moves or clips, the input if that has codes already ("codes"), or, for sums and
#: products, the input if the other operand is a number and else calibration ("operands").
Origin = Literal["seen", "known", "input", "codes", "operands"]

_PLAIN_LAYERS: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN_FUNCTIONS: tuple[Any, ...] = (
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d,
)  # fmt: skip
_TRANSPOSED: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
#: Layers whose weight becomes int8.
WEIGHTED_LAYERS: tuple[Any, ...] = (
    *_PLAIN_LAYERS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
#: The same as functions; the weight is the second argument.
WEIGHTED_FUNCTIONS: tuple[Any, ...] = (*_PLAIN_FUNCTIONS, *_TRANSPOSED)
#: All steps that multiply matrices.
PRODUCTS: tuple[Any, ...] = (*WEIGHTED_FUNCTIONS, torch.matmul, torch.bmm)

_GROUP_NORMS: tuple[Any, ...] = (
    nn.GroupNorm, F.group_norm, torch.group_norm, F.instance_norm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_SEEN: tuple[Any, ...] = (
    *WEIGHTED_LAYERS, *WEIGHTED_FUNCTIONS, torch.matmul,
    nn.ELU, nn.LeakyReLU, nn.PReLU, nn.Hardswish,
    F.elu, F.leaky_relu, F.prelu, torch.prelu, F.hardswish,
    nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, F.layer_norm, *LAYERS, *_GROUP_NORMS,
    # Averages of many values span a small part of their range.
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.mean, "mean",
)  # fmt: skip
_OPERANDS: tuple[Any, ...] = (operator.add, torch.add, operator.mul, torch.mul)
_INPUT: tuple[Any, ...] = (
    torch.cat, torch.stack,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d,
    nn.ReLU, nn.ReLU6, nn.Hardtanh, F.relu, F.relu6, F.hardtanh, torch.clamp,
    nn.Identity, nn.Dropout, F.dropout, nn.PixelShuffle, nn.PixelUnshuffle,
    F.interpolate, F.pixel_shuffle, F.pixel_unshuffle, F.pad,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
    torch.amax, torch.flatten, torch.narrow, torch.repeat_interleave, torch.transpose,
    torch.squeeze, torch.unsqueeze,
    "clamp", "contiguous", "detach", "permute", "relu", "repeat", "repeat_interleave",
    "squeeze", "transpose", "unsqueeze", "view",
)  # fmt: skip
_CODES: tuple[Any, ...] = ("reshape",)

#: Scale and zero point of results between 0 and 1, and between -1 and 1.
_FROM_ZERO, _BOTH_SIDES = (1 / 256, 0), (2 / 256, 128)
KNOWN: dict[Any, tuple[float, int]] = {
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, "sigmoid", nn.Softmax), _FROM_ZERO),
    **dict.fromkeys((nn.Hardsigmoid, F.hardsigmoid, "hardsigmoid"), _FROM_ZERO),
    **dict.fromkeys((nn.Tanh, torch.tanh, "tanh"), _BOTH_SIDES),
}

_TABLES: tuple[tuple[Origin, Any], ...] = (
    ("seen", _SEEN), ("operands", _OPERANDS), ("input", _INPUT), ("codes", _CODES),
    ("known", tuple(KNOWN)),
)  # fmt: skip
ORIGINS: dict[Any, Origin] = {kind: origin for origin, kinds in _TABLES for kind in kinds}

#: What makes one tensor of several.
JOINS: frozenset[Any] = frozenset({*_OPERANDS, torch.cat, torch.stack})

#: What a clamp behind is computed as one with: what it cuts off takes no codes.
BEFORE_CLAMP: frozenset[Any] = frozenset(
    {*WEIGHTED_LAYERS, *WEIGHTED_FUNCTIONS, *_OPERANDS, *_GROUP_NORMS}
    | {nn.BatchNorm2d, nn.BatchNorm3d}
)
CLAMPS: tuple[Any, ...] = (nn.ReLU, nn.ReLU6, nn.Hardtanh, F.relu, F.relu6, F.hardtanh)
#: What scales values below zero: behind these layers it is computed as one with them.
SLOPED: tuple[Any, ...] = (nn.LeakyReLU, nn.PReLU, F.leaky_relu)
BEFORE_SLOPED: frozenset[Any] = frozenset({*WEIGHTED_LAYERS, *WEIGHTED_FUNCTIONS})
#: All clamps: behind a step in float they are float as well, and what they leave is rounded.
ALL_CLAMPS: frozenset[Any] = frozenset({*CLAMPS, torch.clamp, "clamp", "relu"})


def kind_of(node: Node, module: nn.Module | None) -> Any:
    """What the tables know ``node`` by: the class of its ``module``, the function or method."""
    return type(module) if module is not None else node.target


def operands(node: Node) -> list[Node]:
    """The values that ``node`` reads as codes: all of a sum's, the inputs of anything else."""
    if node.target in (*_OPERANDS, torch.matmul):
        return list(node.all_input_nodes)
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    values = first if isinstance(first, list | tuple) else [first]
    return [value for value in values if isinstance(value, Node)]


def weight_axis(node: Node, module: nn.Module | None) -> int:
    """The dimension of output channels in the weight of ``node``."""
    return 1 if is_transposed(node, module) else 0


def is_transposed(node: Node, module: nn.Module | None) -> bool:
    """Whether ``node`` is a transposed convolution."""
    return bool(getattr(module, "transposed", False)) or node.target in _TRANSPOSED
