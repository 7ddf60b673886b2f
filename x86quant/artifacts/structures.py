"""Nested values as plain data: tuples, lists and dicts around numbered leaves.

A call's arguments and a model's result are nested; a graph takes and returns tensors one by one. A
structure says which tensor stands where. Everything else in it is a constant.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from x86quant.errors import ArtifactError, InvalidInputError

#: Constants that a call can be compared with.
PLAIN = (type(None), bool, int, float, str)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """The place of the tensor number ``index``."""

    index: int


def split(
    value: Any, leaves: list[Any], is_leaf: Callable[[Any], bool], what: str = "an argument"
) -> Any:
    """The structure of ``value``, whose leaves are appended to ``leaves``.

    Raises:
        ArtifactError: it holds an object of a class of its own, which no file can hold.
    """
    if is_leaf(value):
        leaves.append(value)
        return Leaf(len(leaves) - 1)
    if type(value) in (tuple, list):
        return type(value)(split(item, leaves, is_leaf, what) for item in value)
    if type(value) in (dict, OrderedDict) and all(isinstance(key, str) for key in value):
        return type(value)((key, split(item, leaves, is_leaf, what)) for key, item in value.items())
    if type(value) in PLAIN or isinstance(value, torch.dtype):
        return value
    raise ArtifactError(f"{what} is of class {type(value).__qualname__}")


def fill(structure: Any, leaves: Sequence[Any]) -> Any:
    """The value of ``structure`` with ``leaves``."""
    if isinstance(structure, Leaf):
        return leaves[structure.index]
    if isinstance(structure, tuple | list):
        return type(structure)(fill(item, leaves) for item in structure)
    if isinstance(structure, dict):
        return type(structure)((key, fill(item, leaves)) for key, item in structure.items())
    return structure


def match(structure: Any, value: Any, leaves: list[Any], where: str) -> None:
    """Put the leaves of ``value`` into their places in ``leaves``.

    Raises:
        InvalidInputError: ``value`` is not of this structure, or a constant in it differs.
    """
    if isinstance(structure, Leaf):
        leaves[structure.index] = value
    elif isinstance(structure, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(structure):
            raise InvalidInputError(
                f"{where} must be {len(structure)} values, as in the example the model was saved "
                f"with, not {_described(value)}"
            )
        for number, (part, item) in enumerate(zip(structure, value, strict=True)):
            match(part, item, leaves, f"{where}[{number}]")
    elif isinstance(structure, dict):
        if not isinstance(value, dict) or value.keys() != structure.keys():
            raise InvalidInputError(
                f"{where} must be a dict of {', '.join(structure)}, not {_described(value)}"
            )
        for key, part in structure.items():
            match(part, value[key], leaves, f"{where}[{key!r}]")
    elif (
        isinstance(value, torch.Tensor) or type(value) is not type(structure) or value != structure
    ):
        raise InvalidInputError(
            f"{where} was {structure!r} in the example the model was saved with, and nothing else "
            f"can be computed from this file: got {_described(value)}"
        )


def leaves_of(structure: Any) -> list[int]:
    """The numbers of the leaves, in order."""
    found: list[Any] = []
    split(structure, found, lambda value: isinstance(value, Leaf), "a structure")
    return [leaf.index for leaf in found]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return f"{value!r:.80}"
