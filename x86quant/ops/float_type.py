"""What ``.half()``, ``.to(...)`` and their kind mean for a module whose state is int8.

Such a module computes as it always does: int8 weights, float32 scales. What another floating type
changes is what it takes and returns, so that it fits the float layers around it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from x86quant.errors import InvalidInputError


def float_type_after(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], now: torch.dtype
) -> torch.dtype:
    """The floating type of the inputs of ``module`` after ``fn`` was applied to it.

    Args:
        module: what is to be changed.
        fn: what ``nn.Module._apply`` would do with every tensor of it.
        now: the type that it takes at present.

    Raises:
        InvalidInputError: ``fn`` moves tensors to another device, or makes no real numbers of them.
    """
    name = type(module).__name__
    try:
        probe = fn(torch.zeros(1, dtype=now))
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise InvalidInputError(f"{name} runs on the CPU only and stays there: {error}") from error
    if probe.device.type != "cpu":
        raise InvalidInputError(
            f"{name} runs on the CPU only and cannot be moved to {probe.device}; "
            "leave it out, or move the float model before it is quantized"
        )
    if not probe.dtype.is_floating_point:
        raise InvalidInputError(
            f"{name} takes and returns real numbers and cannot be turned into {probe.dtype}; "
            "use a floating type, such as torch.bfloat16"
        )
    return probe.dtype


def taken_types(float_type: torch.dtype) -> tuple[torch.dtype, ...]:
    """The types that inputs may have besides float32: the module's own, and that of autocast."""
    if torch.is_autocast_enabled("cpu"):
        return (float_type, torch.get_autocast_dtype("cpu"))
    return (float_type,)
