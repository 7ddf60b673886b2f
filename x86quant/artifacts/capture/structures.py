"""Nested values as plain data: tuples, lists and dicts around numbered leaves.

A call's arguments and a model's result are nested; a graph takes and returns tensors one by one. A
structure says which tensor stands where. Everything else in it is a constant.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import importlib
import keyword
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from x86quant.errors import ArtifactError, InvalidInputError
from x86quant.forms.call_form import STANDS_FOR_NAME

#: Constants that a call can be compared with.
PLAIN = (type(None), bool, int, float, str)

_OUTPUTS = "transformers.modeling_outputs"
#: Where models of transformers have output classes of their own, below the package.
_OWN_OUTPUTS = re.compile(r"(models\.[a-z]\w*\.model(?:ing|ular)_\w+)\.([A-Za-z]\w*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """The place of the tensor number ``index``."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """An object of a class with named fields, which is known by its name alone.

    Attributes:
        kind: "tuple" for a named tuple, "packed" for torch's ``PackedSequence``, "dataclass",
            "enum" for a member, or "transformers" for an output class of that package.
        name: the class's; with its module's path below the package if that is a model's own.
        fields: the content, by name.
        member: of an enumeration, the one that this is about; None when it was read from a file,
            which does not have the class.
    """

    kind: str
    name: str
    fields: dict[str, Any]
    member: enum.Enum | None = dataclasses.field(default=None, compare=False, repr=False)

    def filled(self, values: Sequence[Any]) -> Any:
        """An object with these fields: of a class of the same name and fields, made here."""
        if self.kind == "enum":
            return self.member if self.member is not None else _member(self.name, values[0])
        cls = _class(self.kind, self.name, tuple(self.fields))
        if self.kind in ("tuple", "packed"):
            return cls._make(values)
        return cls(**dict(zip(self.fields, values, strict=True)))

    def check(self) -> None:
        """Raise ArtifactError unless there can be such a class."""
        if self.kind == "enum":
            _check_member(self.name, self.fields)
            return
        own = self.kind == "transformers" and _OWN_OUTPUTS.fullmatch(self.name)
        names = [*([] if own else [self.name]), *self.fields]
        if self.kind not in ("tuple", "packed", "dataclass", "transformers") or not all(
            name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
            for name in names
        ):
            raise ArtifactError(f"there is no class {self.name[:80]!r} of such fields")
        _class(self.kind, self.name, tuple(self.fields))


@functools.lru_cache(maxsize=256)
def _member(kind: str, name: str) -> enum.Enum:
    made: Any = enum.Enum(kind, [name])  # type: ignore[misc]
    setattr(made, STANDS_FOR_NAME, True)
    found: enum.Enum = made[name]
    return found


def _check_member(kind: str, fields: dict[str, Any]) -> None:
    names = [kind, *fields.values()]
    if list(fields) != ["name"] or not all(
        isinstance(x, str) and x.isidentifier() and not keyword.iskeyword(x) and x[0] != "_"
        for x in names
    ):
        raise ArtifactError(f"there is no member {str(names)[:80]} of an enumeration")


@functools.lru_cache(maxsize=256)
def _class(kind: str, name: str, fields: tuple[str, ...]) -> Any:
    if kind in ("tuple", "dataclass"):
        make: Any = collections.namedtuple if kind == "tuple" else dataclasses.make_dataclass
        made = make(name, fields)
        setattr(made, STANDS_FOR_NAME, True)
        return made
    if kind == "packed":
        if (name, fields) != (PackedSequence.__name__, PackedSequence._fields):
            raise ArtifactError(f"there is no packed sequence of the fields {', '.join(fields)}")
        return PackedSequence
    own = _OWN_OUTPUTS.fullmatch(name)
    try:
        home = importlib.import_module(_OUTPUTS if own is None else f"transformers.{own[1]}")
        base = importlib.import_module("transformers.utils").ModelOutput
    except ImportError as error:
        raise ArtifactError(f"its result is a {name} of transformers: install it") from error
    found = getattr(home, name if own is None else own[2], None)
    known = getattr(found, "__dataclass_fields__", {})
    is_output = isinstance(found, type) and issubclass(found, base)
    if not is_output or not {*fields} <= {*known}:
        raise ArtifactError(f"this transformers has no output class {name[:80]!r}")
    return found


def _named(value: Any) -> Named | None:
    """``value`` as fields, if it has them; the file's reader need not have the class."""
    kind: Any = type(value)
    if isinstance(value, enum.Enum) and is_constant(value):
        return Named("enum", kind.__name__, {"name": value.name}, value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        form = "packed" if kind is PackedSequence else "tuple"
        return Named(form, kind.__name__, dict(zip(kind._fields, value, strict=True)))
    if not hasattr(kind, "__dataclass_fields__"):
        return None
    if (name := _output_name(kind)) is not None:
        return Named("transformers", name, dict(value.items()))
    if isinstance(value, dict):
        return None
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    return Named("dataclass", type(value).__name__, fields)


def is_constant(value: Any) -> bool:
    """Whether ``value`` is one that calls can be compared with, and a file can hold."""
    if isinstance(value, enum.Enum):  # sets of flags have no name of their own
        return str(value.name).isidentifier()
    return type(value) in PLAIN


def _output_name(kind: type) -> str | None:
    """The name of an output class of transformers, by which a file's reader finds it."""
    package, _, home = kind.__module__.partition(".")
    module = sys.modules.get(kind.__module__)
    if package != "transformers" or getattr(module, kind.__name__, None) is not kind:
        return None
    if kind.__module__ == _OUTPUTS:
        return str(kind.__name__)
    name = f"{home}.{kind.__name__}"
    return name if _OWN_OUTPUTS.fullmatch(name) else None


def split(
    value: Any, leaves: list[Any], is_leaf: Callable[[Any], bool], what: str = "an argument"
) -> Any:
    """The structure of ``value``, whose leaves are appended to ``leaves``.

    Raises:
        ArtifactError: it holds an object that no file can hold.
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
    named = value if isinstance(value, Named) else _named(value)
    if named is not None:
        fields = {k: split(item, leaves, is_leaf, what) for k, item in named.fields.items()}
        return dataclasses.replace(named, fields=fields)
    raise ArtifactError(f"{what} is of class {type(value).__qualname__}")


def fill(structure: Any, leaves: Sequence[Any]) -> Any:
    """The value of ``structure`` with ``leaves``."""
    if isinstance(structure, Leaf):
        return leaves[structure.index]
    if isinstance(structure, tuple | list):
        return type(structure)(fill(item, leaves) for item in structure)
    if isinstance(structure, dict):
        return type(structure)((key, fill(item, leaves)) for key, item in structure.items())
    if isinstance(structure, Named):
        return structure.filled([fill(item, leaves) for item in structure.fields.values()])
    return structure


def match(structure: Any, value: Any, leaves: list[Any], where: str) -> None:
    """Put the leaves of ``value`` into their places in ``leaves``.

    Raises:
        InvalidInputError: ``value`` is not of this structure, or a constant in it differs.
    """
    if isinstance(structure, Named) and structure.kind == "enum":
        if _named(value) == structure:
            return
        structure = f"{structure.name}.{structure.fields['name']}"
    if isinstance(structure, Named):
        found = _named(value)
        if found is None:
            raise InvalidInputError(f"{where} must be a {structure.name}, not {_described(value)}")
        structure, value = structure.fields, found.fields
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
