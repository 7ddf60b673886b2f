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
    weight_bits: int = 8
    progress: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidInputError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        check_bits(self.weight_bits)
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
