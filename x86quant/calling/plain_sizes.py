"""A block in which a model is traced with free sizes, as long as these stay plain.

Torch works with sizes as formulas of those that are free, and asks sympy to simplify them at each
op. Padding to a multiple of a window and cutting windows out, layer upon layer, makes formulas with
which a single op takes minutes, and then all memory. Such sizes have to be fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from x86quant.errors import UnsupportedError

#: A formula for a size may have so many terms. Convolutions, pools and joins stay below twenty.
_MOST_TERMS = 64


class PlainSizes(TorchFunctionMode):
    """Raises where a result's size becomes an involved formula.

    Raises:
        UnsupportedError: at the op that gives such a result.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and any(map(_is_involved, x.shape)):
                raise UnsupportedError(
                    "its sizes become formulas too involved to trace with sizes left free"
                )
        return result


def _is_involved(size: Any) -> bool:
    if not isinstance(size, torch.SymInt):
        return False
    waiting = [getattr(size.node, "expr", None)]
    terms = 0
    while waiting and terms <= _MOST_TERMS:
        terms += 1
        waiting += getattr(waiting.pop(), "args", ())
    return terms > _MOST_TERMS
