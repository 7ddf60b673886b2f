"""``Settings``: what a user asks of a quantization, checked; one value for every stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from x86quant.dynamic import check_bits
from x86quant.errors import InvalidInputError
from x86quant.observing.activations import OBSERVER_NAMES
from x86quant.quantization.scheme import MODES

Switch = bool | Literal["auto"]
Effort = Literal["fast", "default", "best"]
EFFORTS: tuple[Effort, ...] = ("fast", "default", "best")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of ``quantize`` and ``sensitivity`` that say how; meanings are given there."""

    mode: str = "auto"
    effort: str = "default"
    observer: str = "auto"
    weight_observer: str = "auto"
    activation_bits: int = 8
    equalize: Switch = "auto"
    bias_correction: Switch = "auto"
    smooth_quant: Switch = "auto"
    fuse_blocks: Switch = "auto"
    example_inputs: Sequence[Any] | None = None
    speed_check: bool = True
    strict: bool = False
    embedding_bits: int | None = None
    weight_bits: int | Literal["auto"] = 8
    weight_budget: int | None = None
    progress: bool = True

    @property
    def narrow_bits(self) -> int:
        """The bits of those linears' weights that have fewest."""
        return 4 if self.weight_bits == "auto" else self.weight_bits

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidInputError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.weight_bits != "auto":
            check_bits(self.weight_bits)
        budget = self.weight_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
            raise InvalidInputError(f"weight_budget must be a number of bytes, not {budget!r}")
        if budget is not None and self.weight_bits != "auto":
            raise InvalidInputError('weight_budget needs weight_bits="auto"')
        if self.effort not in EFFORTS:
            raise InvalidInputError(
                f"effort must be one of {', '.join(EFFORTS)}, not {self.effort!r}"
            )
        if self.embedding_bits not in (None, 8, 4, 2):
            raise InvalidInputError(
                f"embedding_bits must be 8, 4, 2 or None, not {self.embedding_bits!r}"
            )
        if self.observer != "auto" and self.observer not in OBSERVER_NAMES:
            raise InvalidInputError(f"observer must be auto or one of {', '.join(OBSERVER_NAMES)}")
        for name in ("equalize", "bias_correction", "smooth_quant", "fuse_blocks"):
            value = getattr(self, name)
            if value != "auto" and not isinstance(value, bool):
                raise InvalidInputError(f'{name} must be True, False or "auto", not {value!r}')
