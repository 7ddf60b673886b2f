"""Programs of the extension: their steps, packed weights, and where they go."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from x86quant import extension
from x86quant.errors import NoKernelError
from x86quant.packing.linear_dynamic import Weights, gated_rows, row_linear
from x86quant.runtime import layout
from x86quant.runtime.plan import Value


@dataclasses.dataclass(eq=False, slots=True)
class NativeTensor:
    """A value as native kernels see it: n, d, h, w, c and the strides of the first four."""

    value: Value
    sizes: Sequence[int]
    strides: Sequence[int]  # in elements

    def words(self) -> list[int]:
        """The field of a step: base, offset, sizes, and strides in bytes."""
        size = self.value.meta.element_size()
        strides = self.strides if size == 1 else [stride * size for stride in self.strides]
        return [*address(self.value), *self.sizes, *strides]


@dataclasses.dataclass(eq=False, slots=True)
class NativeStep:
    """One step of a program.

    Attributes:
        kind: one of ``extension.native().step_kinds()``.
        fields: what a step of this kind reads, by name: tensors of the plan (``NativeTensor``, or
            a bare ``Value`` for the address alone), numbers, flags, lists of numbers of one type,
            tables (tensors), objects of the extension.
    """

    kind: str
    fields: Mapping[str, Any]

    def plain_fields(self) -> dict[str, Any]:
        """The fields, a base and an offset for each tensor: its buffers have places by now."""
        return {
            name: field.words() if type(field) is NativeTensor else _plain(field)
            for name, field in self.fields.items()
        }

    def add_to(self, program: Any) -> None:
        """Append the step to ``program``."""
        program.add_step(self.kind, self.plain_fields())


def _plain(field: Any) -> Any:
    return address(field) if isinstance(field, Value) else field


def address(value: Value) -> list[int]:
    """Base and offset of the first byte."""
    buffer, meta = value.buffer, value.meta
    first = meta.storage_offset()
    inside = int(first) * meta.element_size() if first else 0
    return [buffer.base, buffer.offset + inside]


def as_image(value: Value) -> NativeTensor:
    """A tensor [N, C, *spatial]."""
    return NativeTensor(value, *value.image)


def as_rows(values: Sequence[Value], channel: int) -> list[NativeTensor]:
    """Tensors that differ at most in their channels, as rows of these.

    Raises:
        NoKernelError: they have more dimensions than a native tensor.
    """
    found = layout.rows([value.meta for value in values], channel)
    if found is None:
        raise NoKernelError("its tensors have too many dimensions that lie apart")
    return [NativeTensor(value, *sizes) for value, sizes in zip(values, found, strict=True)]


def rows_of(values: Sequence[Value], out: Value, channel: int) -> dict[str, NativeTensor]:
    """Fields ``a``, perhaps ``b``, and ``out``: tensors of one shape as rows of channels."""
    names = [*"ab"[: len(values)], "out"]
    return dict(zip(names, as_rows([*values, out], channel), strict=True))


def images_of(x: Value, out: Value) -> dict[str, NativeTensor]:
    """Fields ``a`` and ``out``: images."""
    return {"a": as_image(x), "out": as_image(out)}


#: The kernel whose packed weights are one stretch of memory.
NATIVE = "native"


@dataclasses.dataclass(frozen=True, eq=False)
class LayerWeights:
    """A convolution or linear as kernels pack it.

    Attributes:
        weight: int8, (out, in / groups, depth, height, width).
        mult, bias: float32, one an output channel, in steps of the output.
        lut: 256 codes.
        geometry: kernel, stride, padding and dilation, three entries each; groups; transposed; of
            wide convolutions, about how many pixels a call has.
        codes: the input's and the output's zero point, bounds, whether there is a residual, its
            zero point.
        residual_mult: steps of the output for a step of the residual.
        source: the tensor of the graph that the weight was made of.
        slopes: float32, one an output channel, by which what is below zero is multiplied.
    """

    weight: torch.Tensor
    mult: torch.Tensor
    bias: torch.Tensor | None
    lut: torch.Tensor | None
    geometry: list[int]
    codes: list[int]
    residual_mult: float
    source: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


class Programs:
    """Makes programs and packed weights of the extension."""

    def kernel(self, chosen: str) -> str:
        """The kernel that runs what the router has ``chosen`` one for."""
        return chosen

    def pack(self, kernel: str, layer: LayerWeights) -> Any:
        """The weights as ``kernel`` wants them: an object with a method ``bytes``."""
        return self.packed(kernel, layer)

    def packed(self, kernel: str, layer: LayerWeights, known: torch.Tensor | None = None) -> Any:
        """The same; ``known`` is what a pack of the same weights has returned as its ``blob``."""
        return extension.native().pack_graph_conv(
            kernel,
            layer.weight,
            layer.mult,
            layer.bias,
            layer.lut,
            layer.geometry,
            layer.codes,
            layer.residual_mult,
            known,
            layer.slopes,
        )

    def row_linear(self, weights: Weights, activation: str | None) -> Any:
        """The weights of a product of row codes, packed; None where there is nothing to pack."""
        return row_linear(weights, activation)

    def gated_rows(self, gate: Weights, up: Weights, activation: str) -> Any:
        """The same for two products of the same rows that are multiplied."""
        return gated_rows(gate, up, activation)

    def new(self, arena_bytes: int, inputs: int) -> Any:
        """A program without steps; see ``kernels/python/program.cpp`` for its methods."""
        return extension.native().Program(arena_bytes, inputs)

    def add(self, program: Any, step: NativeStep) -> None:
        """Append ``step`` to ``program``; its buffers have their places by now."""
        step.add_to(program)
