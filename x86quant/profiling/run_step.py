"""``RunStep``: one thing that a model does, as explanations and profiles tell it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from x86quant.routing.routes import Choice

#: The kernel of steps that torch runs in float, and of our own ops where they run in plain torch.
TORCH, PLAIN = "torch", "plain"

#: The time of a run that neither compiled graphs nor int8 layers take.
OUTSIDE = "outside of graphs"

_Shape = tuple[int, ...]


#: Ops of ours that compute in float, and what they are called.
_FLOAT_OPS = {"float_conv": "conv", "float_conv_codes": "conv"}


@dataclasses.dataclass(frozen=True)
class RunStep:
    """One thing that a compiled model does.

    Attributes:
        name: the node of the graph.
        layer: what a user knows it by: a module of the source model, else the node.
        op: "conv", "linear", "add", "copy", or the name of a torch op.
        kernel: what runs it; "torch" for a float op.
        rule: what chose the kernel; empty where there is no choice.
        reason: why this kernel, or why it runs in float.
        inputs, output: shapes.
        multiply_adds: products it computes.
        activation_bytes: bytes of its inputs and its output.
        weight_bytes: bytes of its weights.
        fused: what it does besides its op, and the pass that put it there.
        choice: of a convolution or linear, the whole look-up.
        segment: the native segment it is part of; empty for what torch runs.
        parts: the parts of the batch it runs for, one after or beside another.
    """

    name: str
    layer: str
    op: str
    kernel: str
    rule: str
    reason: str
    inputs: tuple[_Shape, ...]
    output: _Shape
    multiply_adds: int = 0
    activation_bytes: int = 0
    weight_bytes: int = 0
    fused: tuple[str, ...] = ()
    choice: Choice | None = None
    segment: str = ""
    parts: int = 1

    @property
    def in_float(self) -> bool:
        """Whether it computes in float, or moves data in torch."""
        return self.kernel == TORCH or self.op in _FLOAT_OPS

    @property
    def kind(self) -> str:
        """A coarse name to group by: "conv 3×3 s2", "depthwise 5×5", "linear", "add", …"""
        if self.choice is None:
            op = _FLOAT_OPS.get(self.op, self.op)
            return f"{op} (float)" if self.in_float else op
        spec = self.choice.spec
        if not spec.kernel:
            return spec.op
        name = "depthwise" if spec.depthwise else "grouped" if spec.groups > 1 else "conv"
        transposed = " transposed" if spec.transposed else ""
        stride = max(spec.stride)
        return f"{name}{transposed} {_by(spec.kernel)}" + (f" s{stride}" if stride > 1 else "")

    @property
    def shape(self) -> str:
        """Its shapes in one line."""
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        if self.choice is None:
            return f"{' + '.join(map(_by, self.inputs))} → {_by(self.output)}{parts}"
        spec = self.choice.spec.replace(rows=None)
        return f"{spec}: {_by(self.inputs[0])} → {_by(self.output)}{parts}"


@dataclasses.dataclass(frozen=True)
class Elided:
    """A node of the graph that needs no step: nothing runs for it."""

    name: str
    layer: str
    op: str
    reason: str


def within(path: str, layer: str) -> str:
    """What ``layer`` of the part at ``path`` is called; the whole model has no path."""
    return f"{path}.{layer}" if path else layer


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, which may be nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"
