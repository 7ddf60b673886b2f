"""oneDNN's matrix micro-kernel as torch exports it, with a convolution's loops around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .. import reasons
from ..base import Kernel

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec


class BrgemmKernel(Kernel):
    """Dense convolutions and linears of compiled models; sums are exact.

    torch offers the micro-kernel for int8 on CPUs with AMX only (``could_pack``).
    """

    name: ClassVar[str] = "brgemm"
    requires: ClassVar[frozenset[str]] = frozenset({"amx_int8"})
    engine: ClassVar[str] = "native"

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        found = reasons.common(spec) + reasons.asymmetric_weights(spec)
        if spec.caller != "graph":
            found.append("only compiled models can call it")
        if spec.in_channels % 4:
            found.append(f"{spec.in_channels} input channels are not a multiple of 4")
        if spec.op != "linear":
            if spec.groups > 1:
                found.append(f"{spec.groups} groups: it multiplies dense matrices")
            if spec.transposed:
                found.append("transposed convolutions are not supported")
            if spec.dims > 2:
                found.append("3d convolutions are not supported")
        return found
