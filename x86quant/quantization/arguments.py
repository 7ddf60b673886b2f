"""Arguments of a call by name, and what they say about the tokens in it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from x86quant.calling.call import Call


def argument(model: nn.Module, call: Call, name: str) -> Any:
    """What ``call`` gives as the argument of that name, or None."""
    try:
        given = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    except (TypeError, ValueError):
        return None
    return {**given, **given.get("kwargs", {})}.get(name)


def padding_mask(model: nn.Module, call: Call) -> torch.Tensor | None:
    """Which tokens are real, by the argument that transformers call so: [batch, tokens]."""
    mask = argument(model, call, "attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not mask.any():
        return None
    return mask.bool() if mask.bool().eq(mask).all() else None  # a mask of sums has other values


def unpadded(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """``x`` of the real tokens alone, if it is of all."""
    return x if mask is None or x.shape[:2] != mask.shape else x[mask]
