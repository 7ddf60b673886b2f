"""Plain data: its types, checked, and arguments of nodes as JSON, and back.

``None``, booleans, integers, finite floats and strings stand for themselves, a JSON array for a
list. Everything else is an object with one key that says what it is::

    {"node": 3}            the result of node 3
    {"tuple": [...]}       {"dict": {...}}      {"slice": [start, stop, step]}
    {"float": "inf"}       {"dtype": "float32"} {"memory_format": "channels_last"}
    {"layout": "strided"}  {"device": "cpu"}    {"ellipsis": null}
    {"ordered": [[key, value], ...]}            an OrderedDict
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch.fx import Node

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


#: Arguments of real models nest two or three levels.
MAX_DEPTH = 16

_INTEGERS = range(-(2**63), 2**63)

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
        "float64", "complex64", "complex128", "quint8", "qint8", "qint32",
    )
}  # fmt: skip
_MEMORY_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
}
_LAYOUTS = {"strided": torch.strided}
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": _DTYPES,
    "memory_format": _MEMORY_FORMATS,
    "layout": _LAYOUTS,
}


def encode(value: Any, index: Mapping[Node, int]) -> Any:
    """``value`` as JSON; ``index`` numbers the nodes. ArtifactError names a type that has none."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Node):
        return {"node": index[value]}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _encode_float(value)
    if isinstance(value, slice):
        return {"slice": [encode(v, index) for v in (value.start, value.stop, value.step)]}
    if type(value) is OrderedDict and all(isinstance(key, str) for key in value):
        return {"ordered": [[key, encode(item, index)] for key, item in value.items()]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, index) for key, item in value.items()}}
    if type(value) in (tuple, torch.Size):
        return {"tuple": [encode(item, index) for item in value]}
    if isinstance(value, list):
        return [encode(item, index) for item in value]
    return _encode_named(value)


def _encode_float(value: float) -> Any:
    return float(value) if math.isfinite(value) else {"float": str(value)}


def _encode_named(value: Any) -> Any:
    if value is Ellipsis:
        return {"ellipsis": None}
    if isinstance(value, torch.device) and value.type == "cpu":
        return {"device": "cpu"}
    for kind, table in _NAMED.items():
        for name, known in table.items():
            if value is known:
                return {kind: name}
    raise ArtifactError(
        f"the argument {value!r} of type {type(value).__qualname__} has no form in an artifact"
    )


def decode(value: Any, nodes: Sequence[Node], depth: int = 0) -> Any:
    """The argument that ``value`` stands for; nodes refer to ``nodes``, which came before."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value not in _INTEGERS:
            raise ArtifactError("an argument is an integer of more than 64 bits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ArtifactError("an argument is a number too large for a float")
        return value
    if depth >= MAX_DEPTH:
        raise ArtifactError(f"an argument is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [decode(item, nodes, depth + 1) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ArtifactError(f"an argument is {str(value)[:80]}, which stands for nothing")
    ((kind, content),) = value.items()
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ArtifactError(f"an argument is of the unknown kind {kind[:80]!r}")
    return decoder(content, nodes, depth + 1)


def _node(content: Any, nodes: Sequence[Node], depth: int) -> Node:
    if type(content) is not int or not 0 <= content < len(nodes):
        raise ArtifactError(
            f"an argument is node {str(content)[:80]}, but only nodes 0..{len(nodes) - 1} "
            "come before it"
        )
    return nodes[content]


def _tuple(content: Any, nodes: Sequence[Node], depth: int) -> tuple[Any, ...]:
    if not isinstance(content, list):
        raise ArtifactError("a tuple argument holds no list")
    return tuple(decode(item, nodes, depth) for item in content)


def _dict(content: Any, nodes: Sequence[Node], depth: int) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ArtifactError("a dict argument holds no object")
    return {key: decode(item, nodes, depth) for key, item in content.items()}


def _ordered(content: Any, nodes: Sequence[Node], depth: int) -> OrderedDict[str, Any]:
    found: OrderedDict[str, Any] = OrderedDict()
    for row in content if isinstance(content, list) else [None]:
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str):
            raise ArtifactError("an ordered argument holds no pairs of names and values")
        found[row[0]] = decode(row[1], nodes, depth)
    return found


def _slice(content: Any, nodes: Sequence[Node], depth: int) -> slice:
    if not isinstance(content, list) or len(content) != 3:
        raise ArtifactError("a slice argument does not have three parts")
    return slice(*(decode(item, nodes, depth) for item in content))


def _device(content: Any, nodes: Sequence[Node], depth: int) -> torch.device:
    if content != "cpu":
        raise ArtifactError(f"an argument is device {str(content)[:80]!r}, and only cpu may be")
    return torch.device("cpu")


def _ellipsis(content: Any, nodes: Sequence[Node], depth: int) -> Any:
    if content is not None:
        raise ArtifactError("an ellipsis argument has content")
    return Ellipsis


def _one_of(kind: str, table: dict[str, Any]) -> Callable[[Any, Sequence[Node], int], Any]:
    def decode_name(content: Any, nodes: Sequence[Node], depth: int) -> Any:
        if not isinstance(content, str) or content not in table:
            raise ArtifactError(f"an argument is the unknown {kind} {str(content)[:80]!r}")
        return table[content]

    return decode_name


_DECODERS: dict[str, Callable[[Any, Sequence[Node], int], Any]] = {
    "node": _node,
    "tuple": _tuple,
    "dict": _dict,
    "ordered": _ordered,
    "slice": _slice,
    "device": _device,
    "ellipsis": _ellipsis,
    "float": _one_of("float", _FLOATS),
    **{kind: _one_of(kind, table) for kind, table in _NAMED.items()},
}
