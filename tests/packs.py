"""Packing and running one quantized op with the stock engine of a given kernel."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import x86quant
from tests.stock_tensors import engine
from x86quant.kernels import Kernel, reference, saturation
from x86quant.spec import OpSpec

Y_ZERO_POINT = 120


@contextlib.contextmanager
def packing_for(kernel: Kernel) -> Iterator[None]:
    """Prepacks make packs of ``kernel``: by its stock engine where it is one, else by routing."""
    if kernel.engine in torch.backends.quantized.supported_engines:
        with engine(kernel.engine):
            yield
    else:
        with engine("x86"), x86quant.enable(), x86quant.override(kernel.name):
            yield


@dataclasses.dataclass
class Problem:
    """One op with its operands: codes, scales, zero points."""

    spec: OpSpec
    x: Tensor
    weight: Tensor
    x_zero_point: int = 0
    weight_zero_point: int = 0
    weight_scale: Tensor = dataclasses.field(default_factory=lambda: torch.ones(1))
    bias: Tensor | None = None
    relu: bool = False
    x_scale: float = 0.02

    def __post_init__(self) -> None:
        facts = saturation.weight_facts(
            self.weight,
            groups=self.spec.groups,
            transposed=self.spec.transposed,
            symmetric=self.weight_zero_point == 0,
        )
        self.spec = self.spec.replace(weights=facts)
        # An output scale that puts most results inside 0..255, where an error shows.
        biggest = self._accumulator().double().abs().amax() if self.x.numel() else torch.ones(())
        self.y_scale = max(float(biggest) * float(self.weight_scale.max()) * self.x_scale, 1e-3)
        self.y_scale /= 100

    def _accumulator(self) -> Tensor:
        s = self.spec
        if s.op == "linear":
            return reference.accumulate_linear(
                self.x, self.x_zero_point, self.weight, self.weight_zero_point
            )
        return reference.accumulate_conv(
            self.x,
            self.x_zero_point,
            self.weight,
            self.weight_zero_point,
            stride=s.stride,
            padding=s.padding,
            dilation=s.dilation,
            groups=s.groups,
            transposed=s.transposed,
            output_padding=s.output_padding,
        )

    def expected(self) -> Tensor:
        """Output codes by the reference."""
        repeat = self.spec.groups if self.spec.transposed and self.spec.per_channel else 1
        return reference.requantize(
            self._accumulator(),
            (self.weight_scale * self.x_scale / self.y_scale).float().repeat(repeat),
            None if self.bias is None else self.bias / self.y_scale,
            Y_ZERO_POINT,
            channel_axis=-1 if self.spec.op == "linear" else 1,
            relu=self.relu,
        )

    def run(self, kernel: Kernel) -> Tensor:
        """Output codes by ``kernel``, packed afresh."""
        x = torch._make_per_tensor_quantized_tensor(self.x, self.x_scale, self.x_zero_point)
        name = self.spec.op.replace("conv", "conv_transpose" if self.spec.transposed else "conv")
        op = getattr(torch.ops.quantized, name + ("_relu" if self.relu else ""))
        y: Tensor = op(x, self.pack(kernel), self.y_scale, Y_ZERO_POINT)
        return y.int_repr()

    def pack(self, kernel: Kernel) -> Any:
        s = self.spec
        weight = quantized_weight(self)
        with packing_for(kernel):
            if s.op == "linear":
                return torch.ops.quantized.linear_prepack(weight, self.bias)
            geometry: tuple[Any, ...] = (s.stride, s.padding)
            if s.transposed:
                prepack = getattr(torch.ops.quantized, f"conv_transpose{s.dims}d_prepack")
                geometry = (*geometry, s.output_padding or (0,) * s.dims)
            else:
                prepack = getattr(torch.ops.quantized, f"conv{s.dims}d_prepack")
            return prepack(weight, self.bias, *geometry, s.dilation, s.groups)

    def error(self, kernel: Kernel) -> int:
        """Largest difference from the reference, in steps of the output scale."""
        got, want = self.run(kernel), self.expected()
        assert got.shape == want.shape
        return int((got.int() - want.int()).abs().max()) if want.numel() else 0


def quantized_weight(problem: Problem) -> Tensor:
    if not problem.spec.per_channel:
        return torch._make_per_tensor_quantized_tensor(
            problem.weight, float(problem.weight_scale), problem.weight_zero_point
        )
    zero_points = torch.full_like(problem.weight_scale, problem.weight_zero_point, dtype=torch.long)
    return torch._make_per_channel_quantized_tensor(
        problem.weight,
        problem.weight_scale.double(),
        zero_points,
        1 if problem.spec.transposed else 0,
    )
