"""oneDNN, through the stock engine's packed weights and, in compiled models, torch's onednn ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .. import reasons, saturation
from ..base import Kernel

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec


class OnednnKernel(Kernel):
    """oneDNN's convolution, deconvolution and matmul primitives."""

    name: ClassVar[str] = "onednn"
    requires: ClassVar[frozenset[str]] = frozenset({"avx2"})
    engine: ClassVar[str] = "onednn"

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        return (
            reasons.common(spec)
            + reasons.stock_part()
            + reasons.dynamic_convolution(spec)
            + reasons.asymmetric_weights(spec)
            + reasons.per_channel_transposed(spec)
            + reasons.output_padding(spec)
            + _gaps_in_transposed(spec)
            + reasons.shared_sums(self.name, saturation.kind(spec), cpu.isa, spec)
        )


class OnednnDynamicKernel(OnednnKernel):
    """The same in linears on float tensors, by the stock dynamic linear."""

    row_breaks = frozenset({2})  # more rows than one would share a range

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        found = super().not_supported_reasons(spec, cpu) + reasons.one_range(spec)
        return found + reasons.groups_of_features(spec)


class OnednnGraphKernel(OnednnKernel):
    """Convolutions and linears of compiled models, without a sum behind them."""

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        return super().not_supported_reasons(spec, cpu) + reasons.whole_tensors_only(spec)


def _gaps_in_transposed(spec: OpSpec) -> list[str]:
    """Output rows that no weight reaches get a zero-point compensation they should not have.

    Not an erratum: no example shows it every time.
    """
    if not spec.transposed or all(s <= k for s, k in zip(spec.stride, spec.kernel, strict=True)):
        return []
    return [
        f"a transposed convolution whose stride {spec.stride} exceeds its kernel {spec.kernel} "
        "is computed wrongly"
    ]
