"""``FlatCall``: a module as a function from tensors to tensors, as torch.export is given it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from x86quant.capture.trace_limits import TraceLimits
from x86quant.forms.call_form import CallForm, Structure, take_apart


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
