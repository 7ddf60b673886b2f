"""What every kernel declares: its name, what it needs of the CPU, and what it refuses.

Legality lives here, beside the kernel, as code that answers with reasons. Preference lives in
``rules/``, as data. A wrong table can therefore cost speed, never correctness.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from x86quant.tables.conditions import Span

if TYPE_CHECKING:
    from x86quant.hardware.cpu import Cpu
    from x86quant.spec import OpSpec


_ANY_WIDTH = Span(1, None)


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """What is found out only when packed weights run; the packs in C++ look for it at each call.

    Attributes:
        kind: "width": the last side of the output is one of ``widths``. "bias": the bias does not
            fit int32 in units of input scale times weight scale. "zero_point": the input's zero
            point exceeds the largest activation code that was promised. "dynamic": the input is
            float, and is quantized by the range that it has.
        widths: of the output, for the kind "width".
    """

    kind: Literal["width", "bias", "zero_point", "dynamic"]
    widths: Span = _ANY_WIDTH

    def applied_to(self, spec: OpSpec) -> OpSpec:
        """``spec`` with what this says of it, as far as a spec has words for it."""
        if self.kind == "zero_point":  # padding is filled with it
            return spec.replace(activation_max=255)
        return spec.replace(dynamic=True) if self.kind == "dynamic" else spec

    def __str__(self) -> str:
        return {
            "width": f"the output is {self.widths} wide",
            "bias": "the bias is too large for the input scale",
            "zero_point": "the input's zero point exceeds the 7 bits promised",
            "dynamic": "the input is quantized as it runs",
        }[self.kind]


class Kernel(abc.ABC):
    """One way of running a quantized op.

    Attributes:
        name: stable; the same in rules, logs, tests and environment variables.
        requires: CPU features (names as in ``Cpu.features``) without which it cannot run.
        engine: what packs weights for it, in the stock operators: a ``Packer`` in C++.
        row_breaks: numbers of rows from which on it may refuse what it ran with fewer, or run what
            it refused; the router looks at both sides of each.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    engine: ClassVar[str]
    row_breaks: ClassVar[frozenset[int]] = frozenset()

    def missing_features(self, cpu: Cpu) -> list[str]:
        """Required features that ``cpu`` lacks, sorted."""
        return sorted(self.requires - cpu.features)

    def quicker_with_narrow_weights(self, cpu: Cpu) -> bool:
        """Whether weights that cannot saturate 16-bit sums are multiplied faster than others."""
        return False

    def situations(self, spec: OpSpec, cpu: Cpu) -> Mapping[Situation, str]:
        """In which situations it cannot run packed weights that it otherwise can, and why.

        The router chooses another kernel for each when it packs, and the pack switches to it. What
        ``not_supported_reasons`` says of ``Situation.applied_to(spec)`` need not be said here too.
        """
        return {}

    @abc.abstractmethod
    def not_supported_reasons(self, spec: OpSpec, cpu: Cpu) -> list[str]:
        """Why this kernel cannot run ``spec`` on ``cpu``; empty when it can.

        Whether ``cpu`` has the ``requires`` features is asked by ``missing_features``, not here.

        When ``spec.weights`` is None the shape alone is judged: reasons that depend on the
        weights (saturation, weight zero points) are left out.
        """
