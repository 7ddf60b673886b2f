"""The table of operators: for each a function on tensors, with what of a node it takes."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from x86quant.errors import UnsupportedError
from x86quant.onnx_models.element_types import torch_dtype

#: The newest version of any operator that the functions were written by.
NEWEST = 28

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: From a node's attributes, the names of its inputs and those of its results: what the function
#: cannot do of what it asks for, in words.
Lacks = Callable[[Mapping[str, Any], Sequence[str], Sequence[str]], str | None]


def _nothing(attributes: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """For functions that can do all of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """How an operator is computed.

    Attributes:
        function: of the node's inputs, by position, None for those left out; of those of its
            attributes that it names; and, where it names them, of ``outputs``, their number, and
            ``version``, the version of the operator. It takes tensors and torch.fx proxies alike.
        numbers: inputs that are a list of numbers: where they are constants or computed from
            sizes, the function gets that list.
        scalars: inputs that are one number: where it is a constant, the function gets it.
        returns_tuple: whether it returns a tuple of results.
        oldest: the oldest version of the operator that it knows.
        lacks: what of a node's wishes the function cannot fulfil.
    """

    function: Callable[..., Any]
    numbers: frozenset[int]
    scalars: frozenset[int]
    returns_tuple: bool
    oldest: int
    lacks: Lacks

    @property
    def keywords(self) -> frozenset[str]:
        """The attributes, and more, that the function takes."""
        if isinstance(self.function, types.BuiltinFunctionType):  # of torch, with tensors alone
            return frozenset()
        found = inspect.signature(self.function).parameters.values()
        return frozenset(p.name for p in found if p.kind is p.KEYWORD_ONLY)


OPERATORS: dict[tuple[str, str], Operator] = {}


def operator(
    *names: str,
    domain: str = "",
    numbers: Collection[int] = (),
    scalars: Collection[int] = (),
    returns_tuple: bool = False,
    oldest: int = 1,
    lacks: Lacks = _nothing,
) -> Callable[[_Function], _Function]:
    """Declare that the decorated function computes the operators ``names``."""

    def declared(function: _Function) -> _Function:
        entry = Operator(
            function, frozenset(numbers), frozenset(scalars), returns_tuple, oldest, lacks
        )
        for name in names:
            assert (domain, name) not in OPERATORS, name
            OPERATORS[domain, name] = entry
        return function

    return declared


def type_lacks(
    attributes: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str]
) -> str | None:
    """Whether an attribute asks for a type that PyTorch does not have."""
    for name in ("to", "dtype", "output_dtype", "output_datatype"):
        if attributes.get(name):
            try:
                torch_dtype(attributes[name], "its result")
            except UnsupportedError as error:
                return str(error)
    return None


def numbers_of(values: Any) -> list[Any]:
    """A list of numbers that is one already, or a tensor at run time."""
    if isinstance(values, list | tuple):
        return list(values)
    found: list[Any] = values.flatten().tolist()
    return found
