"""Where plans go: to programs of the extension, or, by a subclass, elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from x86quant import extension
from x86quant.packing.linear_dynamic import Weights, gated_rows, row_linear
from x86quant.runtime.native_step import NativeStep

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
    """

    weight: torch.Tensor
    mult: torch.Tensor
    bias: torch.Tensor | None
    lut: torch.Tensor | None
    geometry: list[int]
    codes: list[int]
    residual_mult: float
    source: torch.Tensor | None = None


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
