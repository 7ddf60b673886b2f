"""FBGEMM, through the stock engine's packed weights and, in compiled models, its C++ API."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from .. import reasons, saturation
from ..base import Kernel

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec

Path = Literal["gemm", "depthwise", "groupwise", "pointwise", "im2col"]


class FbgemmKernel(Kernel):
    """FBGEMM with 32-bit accumulators."""

    name: ClassVar[str] = "fbgemm"
    requires: ClassVar[frozenset[str]] = frozenset({"avx2"})
    engine: ClassVar[str] = "fbgemm"

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        return (
            reasons.common(spec)
            + reasons.stock_part()
            + reasons.dynamic_convolution(spec)
            + reasons.per_channel_transposed(spec)
            + _long_row_sums(spec)
            + reasons.shared_sums(self.name, path(spec), instructions(path(spec), cpu), spec)
        )


class FbgemmLookup(FbgemmKernel):
    """The stock operators' lookups, behind a comparison of all indices with their bounds."""

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        if spec.op != "embedding_bag":
            return ["it looks up embeddings alone"]
        found = []
        if spec.pooling != "sum":
            found.append("the stock operators sum the rows of a bag, and nothing else")
        if spec.skips:
            found.append("the stock operators know no index that counts for nothing")
        if spec.row_format != "stock" or spec.bits not in (8, 4, 2):
            found.append(
                "the stock operators read codes of 8, 4 or 2 bits with scale and bias behind them"
            )
        return found


class FbgemmDynamicKernel(FbgemmKernel):
    """The same in linears on float tensors, by the stock dynamic linear."""

    row_breaks = frozenset({2})  # more rows than one would share a range

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        found = super().not_supported_reasons(spec, cpu) + reasons.one_range(spec)
        return found + reasons.groups_of_features(spec)


class FbgemmGraphKernel(FbgemmKernel):
    """Convolutions and linears of compiled models, without a sum behind them."""

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        found = super().not_supported_reasons(spec, cpu) + reasons.whole_tensors_only(spec)
        if spec.dims == 3 and spec.kernel[0] == 1:
            found.append("a 3d convolution one frame deep is not supported")
        return found


_INSTRUCTIONS = ("avx512_vnni", "avx512", "avx2")
#: Chooses its instructions by the CPU itself, whatever that is capped to.
_LOOKS_PAST_CAPS: Path = "groupwise"
#: What it then takes is recorded under this name, that is, not at all.
CAPPED = "capped"


def instructions(path: Path, cpu: Cpu) -> str:
    """The set of instructions FBGEMM takes on ``cpu``: it has no AVX-VNNI version.

    Unknown where it looks past a cap: by the length of the CPU's vectors it leaves some of these
    layers to other paths, which keep to the cap.
    """
    if path == _LOOKS_PAST_CAPS and cpu.withheld.intersection(_INSTRUCTIONS):
        return CAPPED
    return next((name for name in _INSTRUCTIONS if name in cpu.features), "no")


def _long_row_sums(spec: OpSpec) -> list[str]:
    """Depthwise kernels add up the activations under one weight in 16 bits.

    They need that sum where the weight's zero point is not 0.
    """
    taps = math.prod(spec.kernel)
    if spec.weights is None or spec.weights.symmetric or path(spec) != "depthwise":
        return []
    if taps * spec.activation_max <= saturation.INT16[1]:
        return []
    return [
        f"16-bit sums of activations can saturate: {taps} of up to {spec.activation_max} each, "
        "which weights with a zero point need"
    ]


def path(spec: OpSpec) -> Path:
    """The path FBGEMM takes, which it decides from the shape alone.

    This restates FBGEMM's own conditions; a test compares it with what the library answers.
    """
    if spec.op == "linear":
        return "gemm"
    kernel, stride, padding, dilation = _as_2d_or_3d(spec)
    unit = (1,) * len(kernel)
    if _depthwise(spec, kernel, stride, padding, dilation):
        return "depthwise"
    if _groupwise(spec, kernel, stride, padding, dilation):
        return "groupwise"
    if kernel == stride == dilation == unit and not any(padding) and not spec.transposed:
        return "pointwise"
    return "im2col"


_Dims = tuple[int, ...]


def _as_2d_or_3d(spec: OpSpec) -> tuple[_Dims, _Dims, _Dims, _Dims]:
    """Kernel, stride, padding, dilation; the stock engine runs a conv1d as 1×k."""
    if spec.op == "conv1d":
        return (
            (1, *spec.kernel),
            (1, *spec.stride),
            (0, *spec.padding),
            (1, *spec.dilation),
        )
    return spec.kernel, spec.stride, spec.padding, spec.dilation


def _depthwise(spec: OpSpec, kernel: _Dims, stride: _Dims, padding: _Dims, dilation: _Dims) -> bool:
    return (
        not spec.transposed
        and spec.groups == spec.in_channels
        and spec.out_channels in (spec.groups, 2 * spec.groups)
        and spec.groups % 8 == 0
        and all(k in (3, 5, 7) for k in kernel)
        and kernel[-1] == kernel[-2]
        and all(s in (1, 2) for s in stride)
        and all(d == 1 for d in dilation)
        and all(p == (k - 1) // 2 for p, k in zip(padding, kernel, strict=True))
    )


# Channels a group -> fewest groups. FBGEMM fills a vector with whole groups, so the fewest
# depends on the vector length: twice as many with AVX-512, where this names too many layers.
# It asks the CPU itself, whatever it is capped to.
_GROUPWISE = {2: 4, 4: 2, 8: 1, 16: 1}


def _groupwise(spec: OpSpec, kernel: _Dims, stride: _Dims, padding: _Dims, dilation: _Dims) -> bool:
    in_group, out_group = spec.in_channels // spec.groups, spec.out_channels // spec.groups
    return (
        not spec.transposed
        and in_group == out_group
        and in_group in _GROUPWISE
        and spec.groups >= _GROUPWISE[in_group]
        and all(k == 3 for k in kernel)
        and all(p == 1 for p in padding)
        and all(d == 1 for d in dilation)
        and stride[-1] == stride[-2]
        and stride[-1] in (1, 2)
    )
