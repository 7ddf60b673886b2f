"""What the weight of a linear is by its types: see ``ops/groups.py`` for the forms there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def has_groups(weight_scale: torch.Tensor) -> bool:
    """Whether these are scales of groups of input features rather than of output features."""
    return weight_scale.dim() > 1


def bits_of(weight: torch.Tensor) -> int:
    """Bits of a code of ``weight``: two of 4 are in a byte without a sign."""
    return 8 if weight.dtype.is_signed else 4


def features_of(weight: torch.Tensor) -> int:
    """The input features of ``weight``, whatever its bits."""
    return weight.shape[1] * 8 // bits_of(weight)
