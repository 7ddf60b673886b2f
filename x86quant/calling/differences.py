"""How two results differ: whether one computation stands for another."""

from __future__ import annotations

from typing import Any

import torch

from x86quant.calling.call import dense
from x86quant.forms.call_form import same_structure, take_apart

#: Largest difference, as a share of the largest value, that is put down to rounding: of a float
#: model traced in another way, and of one and the same arithmetic, where only products of torch
#: may add up in another order from call to call.
ROUNDING, SAME_ARITHMETIC = 1e-4, 1e-5
#: Largest share of integers that differ because rounding decided otherwise (argmax, say).
_FLIPPED = 1e-3


def difference(expected: Any, actual: Any, rounding: float = ROUNDING) -> str | None:
    """How two results differ beyond rounding, or None.

    Raises:
        UnsupportedError: one is of a class that cannot be looked into.
    """
    structure, exact = take_apart(expected)
    other, found = take_apart(actual)
    if not same_structure(structure, other):
        return f"it returns {_named(actual)}, not {_named(expected)}"
    for x, y in zip(exact, found, strict=True):
        if (reason := _tensors_differ(x.detach(), y.detach(), rounding)) is not None:
            return reason
    return None


def _tensors_differ(x: torch.Tensor, y: torch.Tensor, rounding: float) -> str | None:
    if x.shape != y.shape or x.dtype is not y.dtype or x.layout is not y.layout:
        return f"{y.dtype} {tuple(y.shape)}, not {x.dtype} {tuple(x.shape)}"
    if not x.numel():
        return None
    x, y = dense(x), dense(y)
    if not (x.is_floating_point() or x.is_complex()):
        flipped = float((x != y).double().mean())
        return "other integers" if flipped > (_FLIPPED if rounding >= ROUNDING else 0.0) else None
    if bool((torch.isfinite(x) != torch.isfinite(y)).any()):
        return "other values are infinite or no numbers"
    x, y = torch.nan_to_num(x), torch.nan_to_num(y)
    largest = float(x.abs().max())
    off = float((x - y).abs().max())
    if off > rounding * largest + 1e-9:
        return f"values differ by {off:.3g}, the largest being {largest:.3g}"
    return None


def _named(value: Any) -> str:
    return type(value).__name__
