"""Copies of modules that are in the mode of what they are copies of."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

_M = TypeVar("_M", bound=nn.Module)


def in_its_mode(module: _M, memo: dict[int, Any] | None = None) -> _M:
    """``copy.deepcopy`` of ``module``; each module in it trains if, and only if, its original does.

    torchvision's feature extractors have a graph for each mode, and their copies begin to train.
    """
    found = copy.deepcopy(module, memo)
    copies = dict(found.named_modules())
    pairs = [(one, copies[name]) for name, one in module.named_modules() if name in copies]
    for before, after in pairs:
        if after.training is not before.training:
            after.train(before.training)  # which may choose another graph, and tells all inside
    for before, after in pairs:
        after.training = before.training
    return found
