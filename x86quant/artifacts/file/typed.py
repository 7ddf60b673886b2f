"""What every reader of plain data asks first: the type of a value, and its entries."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, TypeVar

from x86quant.errors import ArtifactError, UnsupportedError
from x86quant.forms.size_conditions import Condition, check

_T = TypeVar("_T")


def check_keys(what: str, found: Mapping[str, Any], expected: Set[str]) -> None:
    """Raise ArtifactError unless ``found`` has just the entries ``expected``."""
    if found.keys() != expected:
        odd = ", ".join(sorted(found.keys() ^ expected))
        raise ArtifactError(f"{what} has missing or unknown entries: {odd[:200]}")


def typed(kind: type[_T], value: object, what: str) -> _T:
    """``value``, which must be of ``kind``."""
    if type(value) is not kind:
        raise ArtifactError(f"{what} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def read_conditions(content: object, inputs: int) -> tuple[Condition, ...]:
    """The conditions on the sizes of so many inputs that a file holds."""
    try:
        return check(content, inputs)
    except UnsupportedError as error:
        raise ArtifactError(str(error)) from error
