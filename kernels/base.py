"""What every kernel declares: its name, what it needs of the CPU, and what it refuses.

Legality lives here, beside the kernel, as code that answers with reasons. Preference lives in
``rules/``, as data. A wrong table can therefore cost speed, never correctness.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec


class Kernel(abc.ABC):
    """One way of running a quantized op.

    Attributes:
        name: stable; the same in rules, logs, tests and environment variables.
        requires: CPU features (names as in ``Cpu.features``) without which it cannot run.
        engine: the stock engine whose prepack makes this kernel's packed weight.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    engine: ClassVar[str]

    def missing_features(self, cpu: Cpu) -> list[str]:
        """Required features that ``cpu`` lacks, sorted."""
        return sorted(self.requires - cpu.features)

    def quicker_with_narrow_weights(self, cpu: Cpu) -> bool:
        """Whether weights that cannot saturate 16-bit sums are multiplied faster than others."""
        return False

    @abc.abstractmethod
    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """Why this kernel cannot run ``spec`` on ``cpu``; empty when it can.

        That ``cpu`` has the ``requires`` features is asked apart, by ``missing_features``.

        When ``spec.weights`` is None the shape alone is judged: reasons that depend on the
        weights (saturation, weight zero points) are left out.
        """
