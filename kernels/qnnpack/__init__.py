"""QNNPACK, through the stock engine's packed weights: the exact kernel for CPUs without VNNI.

Its SSE2 kernels widen to 16 bits before they multiply and add products in 32, so no weight can
make them saturate; the record of shared sums says so too. It is several times slower than the
others where those are legal.

What cannot be known when weights are packed, and is for the packs (``packer.cpp``) to observe:

* A pack keeps the output scale of its first run, and pads with the zero point of its first run,
  until the *input scale* changes: each (input scale, input zero point, output scale) needs a pack
  of its own.
* The bias is rounded to int32 in units of ``x_scale * w_scale``: where ``|bias|`` over that
  reaches 2**31 (a dead channel with a tiny weight scale) the result is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from .. import reasons, saturation
from ..base import Kernel, Situation

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec


class QnnpackKernel(Kernel):
    """QNNPACK's SSE2 kernels."""

    name: ClassVar[str] = "qnnpack"
    engine: ClassVar[str] = "qnnpack"

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        return (
            reasons.common(spec)
            + reasons.dynamic_convolution(spec)
            + reasons.shared_sums(self.name, saturation.kind(spec), cpu.isa, spec)
        )

    def situations(self, spec: OpSpec, cpu: Cpu) -> Mapping[Situation, str]:
        """See the base class."""
        if not spec.bias or spec.dynamic:
            return {}
        return {Situation("bias"): "it rounds the bias to int32 in those units"}
