"""``FlatCall``: a module as a function from tensors to tensors, as torch.export is given it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import CallForm, Structure, take_apart

#: A formula for a size may have so many terms. Convolutions, pools and joins stay below twenty.
_MOST_TERMS = 64
#: So many tensors may be computed. Deep transformers stay below three thousand.
_MOST_TENSORS = 10_000
#: What makes as many tensors as a dimension has places.
_TAKE_APART = (torch.Tensor.__iter__, torch.Tensor.unbind, torch.unbind)


class TraceLimits(TorchFunctionMode):
    """A block in which a model is exported; raises where that takes longer than anybody waits.

    With free sizes torch works with formulas, and asks sympy to simplify them at each op. Padding
    to a multiple of a window and cutting windows out, layer upon layer, makes formulas with which
    a single op takes minutes, and then all memory: such sizes have to be fixed. And a loop over
    every value of a tensor is unrolled, at milliseconds a step.

    Raises:
        UnsupportedError: at the op that goes beyond a limit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TAKE_APART:  # which by itself takes minutes
            self._count(_length(*args, **(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._count(len(tensors))
        if any(_is_involved(size) for x in tensors for size in x.shape):
            raise UnsupportedError(
                "its sizes become formulas too involved to trace with sizes left free"
            )
        return result

    def _count(self, tensors: int) -> None:
        self._tensors += tensors
        if self._tensors > _MOST_TENSORS:
            raise UnsupportedError(
                f"it computes more than {_MOST_TENSORS} tensors: a loop over values, say"
            )


def _length(input: torch.Tensor, dim: int = 0) -> int:
    """How many places there are along ``dim`` in the example."""
    size = input.shape[dim] if input.dim() else 0
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size


def _is_involved(size: Any) -> bool:
    if not isinstance(size, torch.SymInt):
        return False
    waiting = [getattr(size.node, "expr", None)]
    terms = 0
    while waiting and terms <= _MOST_TERMS:
        terms += 1
        waiting += getattr(waiting.pop(), "args", ())
    return terms > _MOST_TERMS


class _Kept:
    """Keeps what torch.export would undo, were it an attribute of the module or in a list of it."""

    results: Structure | None = None


class FlatCall(nn.Module):
    """Takes the tensors of a call one by one, and returns those of the result.

    Attributes:
        inner: the module that is called.
        results: the structure of its result, once it was called.
    """

    def __init__(self, module: nn.Module, form: CallForm, *, hooks: bool) -> None:
        super().__init__()
        self.inner = module
        self._form = form
        self._hooks = hooks
        self._kept = _Kept()

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """The module's result, after its hooks if they count."""
        args, kwargs = self._form.call(tensors)
        with TraceLimits():
            found = (self.inner if self._hooks else self.inner.forward)(*args, **kwargs)
        structure, leaves = take_apart(found, _is_leaf)
        self._kept.results = structure
        return tuple(leaves)

    @property
    def results(self) -> Structure:
        """The structure of the result of the last call."""
        assert self._kept.results is not None
        return self._kept.results


def _is_leaf(value: object) -> bool:
    """Whether ``value`` is a tensor, or a size that is not fixed."""
    return isinstance(value, torch.Tensor | torch.SymInt)
