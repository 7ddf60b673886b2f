"""The arguments of a call of the user's module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

_SPARSE = frozenset(
    getattr(torch, f"sparse_{name}") for name in ("coo", "csr", "csc", "bsr", "bsc")
)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, function: Callable[..., Any]) -> Any:
        """``function`` of copies of these arguments, which it may overwrite."""
        own = self.copied()
        return function(*own.args, **own.kwargs)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors among the arguments, however deep in containers."""
        found: list[torch.Tensor] = []
        self.mapped(lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
        return found

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The call with ``function`` of each tensor in its place."""
        args, kwargs = _mapped((self.args, dict(self.kwargs)), function)
        return Call(args, kwargs)

    def without_first_items(self) -> Call:
        """The call with the first item missing in each list of several tensors."""

        def is_list(value: Any) -> bool:
            return type(value) is list and all(isinstance(x, torch.Tensor) for x in value)

        def shortened(value: Any) -> Any:
            return value[1:] if is_list(value) and len(value) > 1 else value

        args, kwargs = pytree.tree_map(shortened, (self.args, dict(self.kwargs)), is_leaf=is_list)
        return Call(args, kwargs)

    def copied(self) -> Call:
        """The call with tensors of its own, for functions that may change what they are given."""
        return self.mapped(torch.Tensor.clone)

    def __str__(self) -> str:
        return ", ".join(str(tuple(x.shape)) for x in self.leaves)


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself, or as a dense tensor: few ops take a sparse one."""
    return x.to_dense() if x.layout in _SPARSE else x


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``function`` of each tensor in containers and dataclasses in its place."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        own = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):  # of a frozen one, too
                object.__setattr__(own, field.name, _mapped(getattr(leaf, field.name), function))
        return own

    return pytree.tree_map(one, value)
