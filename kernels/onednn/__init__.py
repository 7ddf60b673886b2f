"""oneDNN, through the stock engine's packed weights and, in compiled models, torch's onednn ops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from .. import reasons, saturation
from ..base import Kernel

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec

VNNI = frozenset({"avx_vnni", "avx512_vnni"})


class OnednnKernel(Kernel):
    """oneDNN's convolution, deconvolution and matmul primitives."""

    name: ClassVar[str] = "onednn"
    requires: ClassVar[frozenset[str]] = frozenset({"avx2"})
    engine: ClassVar[str] = "onednn"

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        found = (
            reasons.common(spec)
            + reasons.asymmetric_weights(spec)
            + reasons.per_channel_transposed(spec)
            + reasons.output_padding(spec)
            + _unequal_transposed(spec)
            + _gaps_in_transposed(spec)
            + _wide_depthwise_padding(spec)
            + _one_column(spec)
            + (_padded_column_kernel(spec) if "amx_int8" in cpu.features else [])
        )
        if not VNNI & cpu.features and not _exact_depthwise(spec):
            # Its implementations differ in layout and are chosen by shapes not known yet.
            found += reasons.pair_saturation(spec, saturation.ANY)
        return found


class OnednnDynamicKernel(OnednnKernel):
    """The same in linears on float tensors, by the stock dynamic linear."""

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        return super().not_supported_reasons(spec, cpu) + reasons.one_range(spec)


class OnednnGraphKernel(OnednnKernel):
    """Convolutions and linears of compiled models, without a sum behind them."""

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        return super().not_supported_reasons(spec, cpu) + reasons.whole_tensors_only(spec)


def _exact_depthwise(spec: OpSpec) -> bool:
    """Depthwise kernels of one output a channel multiply in 32 bits, in one and two dimensions."""
    return (
        spec.depthwise
        and spec.out_channels == spec.groups
        and spec.dims in (1, 2)
        and not spec.transposed
    )


def _unequal_transposed(spec: OpSpec) -> list[str]:
    """The stock engine packs the weight with input and output channels exchanged.

    Where their numbers differ, the packed weight is read past its end: silent garbage.
    """
    if not spec.transposed or spec.in_channels == spec.out_channels:
        return []
    return [
        f"a transposed convolution of {spec.in_channels}→{spec.out_channels} channels is "
        "computed wrongly: the two must be equal"
    ]


def _gaps_in_transposed(spec: OpSpec) -> list[str]:
    """Output rows that no weight reaches get a zero-point compensation they should not have."""
    if not spec.transposed or all(s <= k for s, k in zip(spec.stride, spec.kernel, strict=True)):
        return []
    return [
        f"a transposed convolution whose stride {spec.stride} exceeds its kernel {spec.kernel} "
        "is computed wrongly"
    ]


def _wide_depthwise_padding(spec: OpSpec) -> list[str]:
    """The VNNI depthwise kernel leaves whole rows of padding without zero-point compensation."""
    if not spec.depthwise or all(p < k for p, k in zip(spec.padding, spec.kernel, strict=True)):
        return []
    return [
        f"a depthwise convolution whose padding {spec.padding} reaches its kernel {spec.kernel} "
        "is computed wrongly"
    ]


def _one_column(spec: OpSpec) -> list[str]:
    """The VNNI and AMX convolutions mix up rows that are one pixel wide.

    The input size is unknown when weights are packed: the runtime asks again when it knows.
    """
    out = output_size(spec)
    if out is None or out[-1] != 1 or math.prod(out) == 1 or spec.stride[-1] == 1:
        return []
    return [f"an output one column wide {out} with stride {spec.stride} is computed wrongly"]


def _padded_column_kernel(spec: OpSpec) -> list[str]:
    """The AMX convolutions go wrong on such kernels where outputs are 16 or 32 pixels wide.

    As above, the runtime asks again when it knows the size.
    """
    out = output_size(spec)
    if out is None or out[-1] % 16 or spec.kernel[-1] != 1 or not any(spec.padding[:-1]):
        return []
    return [
        f"a kernel one column wide {spec.kernel} with padding {spec.padding} is computed wrongly "
        f"where its output is {out[-1]} columns wide"
    ]


def output_size(spec: OpSpec) -> tuple[int, ...] | None:
    """Spatial size of the output, None when that of the input is unknown."""
    if spec.spatial is None or spec.op == "linear" or spec.transposed:
        return None
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(
            spec.spatial, spec.padding, spec.dilation, spec.kernel, spec.stride, strict=True
        )
    )
