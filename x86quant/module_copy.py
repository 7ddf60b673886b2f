"""Copies of modules that do what their originals do: in their mode, with their hooks."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

_M = TypeVar("_M", bound=nn.Module)


#: Where torch keeps what is called before and after a module.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def alike(module: _M, memo: dict[int, Any] | None = None) -> _M:
    """``copy.deepcopy`` of ``module``, of graph modules as well.

    Copies of those lose their hooks, and copies of torchvision's feature extractors, which have a
    graph for each mode, begin to train.
    """
    found = copy.deepcopy(module, memo)
    copies = dict(found.named_modules())
    pairs = [(one, copies[name]) for name, one in module.named_modules() if name in copies]
    for before, after in pairs:
        if after.training is not before.training:
            after.train(before.training)  # which may choose another graph, and tells all inside
    for before, after in pairs:
        after.training = before.training
        for kind in HOOKS:
            if (lost := getattr(before, kind)) and not getattr(after, kind):
                getattr(after, kind).update(lost)
    return found
