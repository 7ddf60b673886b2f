"""x86quant's own kernels, in C++: exact on every instruction set, for every shape.

``native.h`` is their interface. In the stock workflows they run static convolutions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .. import reasons
from ..base import Kernel

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec


#: Features of the longest groups of which a block of two vectors of 512 bits fits its place.
MOST_UNPACKED = 512


class NativeKernel(Kernel):
    """Convolutions with exact 32-bit sums, requantized in the same pass."""

    name: ClassVar[str] = "native"
    requires: ClassVar[frozenset[str]] = frozenset({"avx2"})
    engine: ClassVar[str] = "native"

    def quicker_with_narrow_weights(self, cpu: Cpu) -> bool:
        """See the base class."""
        return not cpu.vnni

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        found = reasons.common(spec) + reasons.asymmetric_weights(spec)
        if spec.op == "linear":
            found.append("linear layers, which may turn out dynamic, are not supported")
        elif spec.dynamic:
            found.append("dynamic convolutions are not supported")
        return found


class NativeLookup(NativeKernel):
    """Bags of embeddings, in every format, with each index compared as its row is read."""

    requires: ClassVar[frozenset[str]] = frozenset()  # plain loops elsewhere

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        return [] if spec.op == "embedding_bag" else ["it looks up embeddings alone"]


class NativeBlocksKernel(Kernel):
    """Linears on float tensors by weights of 4 bits, a block of which becomes bytes for many rows.

    The same packed weights as the kernel "native" reads, whose bytes are its own.
    """

    name: ClassVar[str] = "native_blocks"
    requires: ClassVar[frozenset[str]] = frozenset({"avx2"})
    engine: ClassVar[str] = "native"

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        if spec.op != "linear" or not spec.dynamic or spec.bits != 4:
            return ["it unpacks weights of 4 bits of linears on float tensors"]
        if spec.weight_group is not None and spec.weight_group > MOST_UNPACKED:
            return [f"it unpacks groups of {MOST_UNPACKED} features at most"]
        return []


class NativeGraphKernel(NativeKernel):
    """The same in compiled models and linears on float tensors, where no linear is in doubt."""

    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """See the base class."""
        return reasons.common(spec) + reasons.asymmetric_weights(spec)
