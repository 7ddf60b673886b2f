"""How a graph is called and which calls it holds for, as plain data.

Arguments and results are a :class:`Structure` without its tensors. Constants, lists, tuples and
dicts are spelled as arguments of nodes are, and beside them::

    {"leaf": 0}                                     the place of a tensor, numbered in order
    {"named": ["tuple", "Pair", {...}]}             an object of a class with named fields
    {"named": ["enum", "Way", {"name": "ONE"}]}     a member of an enumeration

A class is known by its name alone, and one of that name and fields is made by the reader; the kind
"mapping" is a dataclass that is a dict as well, like results of diffusers. The kind
"packed" is torch's ``PackedSequence``; for "transformers", output classes of that package are
looked up by name, and nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import itertools
import keyword
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.utils.rnn import PackedSequence

from x86quant.artifacts.file import container
from x86quant.artifacts.file.values import (
    MAX_DEPTH,
    check_keys,
    decode,
    encode,
    read_conditions,
    typed,
)
from x86quant.errors import ArtifactError
from x86quant.forms import stand_ins
from x86quant.forms.call_form import CallForm, Structure, take_apart
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.forms.size_conditions import sizes_in

CALL_ENTRIES = {"parameters", "arguments", "names", "result", "guard"}
_KINDS = {kind.name: kind for kind in inspect._ParameterKind}
DTYPES = {str(d).removeprefix("torch."): d for d in container.STORABLE}
_MAX_RANK = 64
_NO_DEFAULT = inspect.Parameter.empty


def write_call(form: CallForm, results: Structure, guard: Guard) -> dict[str, Any]:
    """How a graph is called, what it returns and which calls it holds for, as JSON."""
    return {
        "parameters": [_parameter(p) for p in form.signature.parameters.values()],
        "arguments": write_structure(form.arguments, "an argument"),
        "names": list(form.names),
        "result": write_structure(results, "its result"),
        "guard": {
            "inputs": [_input(x) for x in guard.inputs],
            "conditions": list(guard.conditions),
        },
    }


def read_call(
    content: dict[str, Any], graph_module: GraphModule
) -> tuple[CallForm, Structure, Guard]:
    """What ``write_call`` wrote about ``graph_module``.

    Raises:
        ArtifactError: it is nothing like that, or does not fit the graph.
    """
    arguments, results = (read_structure(content[key]) for key in ("arguments", "result"))
    names = typed(list, content["names"], "names")
    inputs = sum(node.op == "placeholder" for node in graph_module.graph.nodes)
    if not all(isinstance(n, str) for n in names) or not arguments.leaves == len(names) == inputs:
        raise ArtifactError(f"a guarded graph of {inputs} inputs is called with others")
    if arguments.kind is not dict:
        raise ArtifactError("the arguments of a guarded graph are no dict")
    check_outputs(results, graph_module)
    form = CallForm(_signature(content["parameters"]), arguments, tuple(names))
    return form, results, _read_guard(content["guard"], inputs)


def check_outputs(results: Structure, graph_module: GraphModule) -> None:
    """Raise ArtifactError unless ``graph_module`` returns the tensors of ``results``."""
    *_, output = graph_module.graph.nodes
    if not isinstance(output.args[0], tuple) or len(output.args[0]) != results.leaves:
        raise ArtifactError(f"a graph returns something else than {results.leaves} tensors")


def is_constant(argument: Structure) -> bool:
    """Whether an argument can only be what it was in the example: left out, or a number."""
    return argument.kind not in (None, tuple, list, dict) and not argument.parts


def takes_others(form: CallForm) -> bool:
    """Whether a list is given, or a number that is no default: lengths and sizes vary."""

    def found(structure: Structure) -> bool:
        return structure.kind in (int, float, list) or any(map(found, structure.parts))

    defaults = {name: p.default for name, p in form.signature.parameters.items()}
    arguments = zip(form.arguments.keys, form.arguments.parts, strict=True)
    return any(found(part) and part.value is not defaults[name] for name, part in arguments)


def _parameter(parameter: inspect.Parameter) -> list[Any]:
    has_default = parameter.default is not parameter.empty
    structure = take_apart(parameter.default if has_default else None, _no_tensor)[0]
    default = write_structure(structure, "a default")
    return [parameter.name, parameter.kind.name, has_default, default]


def _no_tensor(_: object) -> bool:
    return False


def _signature(rows: object) -> inspect.Signature:
    found = []
    for row in typed(list, rows, "parameters"):
        if not isinstance(row, list) or len(row) != 4 or str(row[1]) not in _KINDS:
            raise ArtifactError("a parameter of a guarded graph is not as it should be")
        name, kind, has_default, default = row
        if not typed(str, name, "the name of a parameter").isidentifier():
            raise ArtifactError(f"a parameter of a guarded graph is called {name[:80]!r}")
        value = read_structure(default).fill(()) if has_default is True else _NO_DEFAULT
        try:
            found.append(inspect.Parameter(name, _KINDS[str(kind)], default=value))
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"a parameter of a guarded graph is wrong: {error}") from error
    try:
        return inspect.Signature(found)
    except ValueError as error:
        raise ArtifactError(f"the parameters of a guarded graph are wrong: {error}") from error


# --- which calls it holds for ---


def _input(x: GuardedInput) -> list[Any]:
    dtype = str(x.dtype).removeprefix("torch.")
    single = None if x.single is None else sorted(x.single)
    return [x.name, dtype, x.rank, [list(pair) for pair in x.fixed], single]


def _read_guard(content: object, count: int) -> Guard:
    found = typed(dict, content, "a guard")
    check_keys("a guard", found, {"inputs", "conditions"})
    rows = typed(list, found["inputs"], "inputs of a guard")
    if len(rows) != count:
        raise ArtifactError(f"a guard of a graph with {count} inputs is for {len(rows)}")
    inputs = tuple(_read_input(row) for row in rows)
    conditions = read_conditions(found["conditions"], count)
    for condition in conditions:
        for number, dim in sizes_in(condition):
            if dim >= inputs[number].rank:
                raise ArtifactError(f"a condition is on dimension {dim} of input {number}")
    return Guard(inputs, conditions)


def _read_input(row: object) -> GuardedInput:
    if not isinstance(row, list) or len(row) != 5:
        raise ArtifactError("an input of a guard is not as it should be")
    name, dtype, rank, fixed, single = row
    if not isinstance(name, str) or type(rank) is not int or not 0 <= rank <= _MAX_RANK:
        raise ArtifactError("an input of a guard has no name or rank")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ArtifactError(f"an input of a guard has the unknown dtype {str(dtype)[:80]!r}")
    pairs = typed(list, fixed, "fixed sizes")
    if not all(isinstance(p, list) and len(p) == 2 and _is_dim(p[0], rank) for p in pairs):
        raise ArtifactError("an input of a guard has a fixed size in no dimension")
    if not all(type(p[1]) is int for p in pairs):
        raise ArtifactError("a fixed size of a guard is no number")
    if single is not None and not all(_is_dim(d, rank) for d in typed(list, single, "dimensions")):
        raise ArtifactError("an input of a guard has a dimension that is none")
    return GuardedInput(
        name,
        DTYPES[dtype],
        rank,
        tuple((dim, size) for dim, size in pairs),
        None if single is None else frozenset(single),
    )


def _is_dim(value: object, rank: int) -> bool:
    return type(value) is int and 0 <= value < rank


_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)
_OUTPUTS = "transformers.modeling_outputs"
#: Where models of transformers have output classes of their own, below the package.
_OWN_OUTPUTS = re.compile(r"(models\.[a-z]\w*\.model(?:ing|ular)_\w+)\.([A-Za-z]\w*)")


def write_structure(structure: Structure, what: str) -> Any:
    """``structure`` as JSON; ``what`` it is, for messages.

    Raises:
        ArtifactError: it holds an object that no file can hold.
    """
    return _written(structure, what, itertools.count())


def _written(structure: Structure, what: str, numbers: Iterator[int]) -> Any:
    kind = structure.kind
    if kind is None:
        return {"leaf": next(numbers)}
    if issubclass(kind, enum.Enum):
        if not str(structure.value.name).isidentifier():  # a set of flags
            raise ArtifactError(f"{what} is of class {kind.__qualname__}")
        return {"named": ["enum", kind.__name__, {"name": structure.value.name}]}
    if kind in _CONSTANTS:
        return encode(structure.value, {})
    parts = [_written(part, what, numbers) for part in structure.parts]
    named = dict(zip(structure.keys, parts, strict=bool(structure.keys)))
    if not all(isinstance(key, str) for key in structure.keys):
        raise ArtifactError(f"{what} is a dict with keys that are no strings")
    if kind is list:
        return parts
    if kind is tuple:
        return {"tuple": parts}
    if kind is dict:
        return {"dict": named}
    if kind is OrderedDict:
        return {"ordered": [[key, part] for key, part in named.items()]}
    form = _named_form(kind)
    if form is None:
        raise ArtifactError(f"{what} is of class {kind.__qualname__}")
    if form[0] == "transformers":  # its fields are None unless they are given
        named = {key: part for key, part in named.items() if part is not None}
    return {"named": [*form, named]}


def _named_form(kind: Any) -> tuple[str, str] | None:
    """How a class with named fields is told of, if a file's reader can have such a one."""
    if kind is PackedSequence:
        return "packed", kind.__name__
    form = stand_ins.form_of(kind)
    if form == "mapping" and (name := _output_name(kind)) is not None:
        return "transformers", name
    return None if form is None else (form, kind.__name__)


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


def read_structure(content: object) -> Structure:
    """What ``write_structure`` wrote.

    Raises:
        ArtifactError: it is nothing like that, or its tensors are not in order.
    """
    return _read(content, itertools.count(), 0)


def _read(content: object, numbers: Iterator[int], depth: int) -> Structure:
    if depth >= MAX_DEPTH:
        raise ArtifactError(f"a structure is nested more than {MAX_DEPTH} levels deep")
    if isinstance(content, list):
        return Structure(list, (), _parts(content, numbers, depth))
    if isinstance(content, dict) and len(content) == 1:
        ((form, inner),) = content.items()
        if form == "leaf":
            if type(inner) is not int or inner != next(numbers):
                raise ArtifactError("the tensors of a structure are not in order")
            return Structure(None)
        if form == "tuple" and isinstance(inner, list):
            return Structure(tuple, (), _parts(inner, numbers, depth))
        if form == "dict" and isinstance(inner, dict):
            return Structure(dict, tuple(inner), _parts(inner.values(), numbers, depth))
        if form == "ordered" and isinstance(inner, list):
            rows = [row for row in inner if isinstance(row, list) and len(row) == 2]
            keys = tuple(key for key, _ in rows if isinstance(key, str))
            if len(keys) == len(inner):
                parts = _parts([part for _, part in rows], numbers, depth)
                return Structure(OrderedDict, keys, parts)
        if form == "named":
            return _read_named(inner, numbers, depth)
    value = decode(content, ())
    if type(value) not in _CONSTANTS:
        raise ArtifactError(f"a structure holds {str(content)[:80]}, which stands for nothing")
    return Structure(type(value), value=value)


def _parts(content: Any, numbers: Iterator[int], depth: int) -> tuple[Structure, ...]:
    return tuple(_read(part, numbers, depth + 1) for part in content)


def _read_named(content: object, numbers: Iterator[int], depth: int) -> Structure:
    match content:
        case ["enum", str(name), {"name": str(value), **rest}] if not rest:
            if not _is_name(name) or not _is_name(value):
                raise ArtifactError(f"there is no member {value[:80]!r} of an enumeration")
            member = stand_ins.member(name, value)
            return Structure(type(member), value=member)
        case [str(form), str(name), dict(fields)]:
            parts = dict(zip(fields, _parts(fields.values(), numbers, depth), strict=True))
            return _of_class(form, name, parts)
    raise ArtifactError("an object with named fields is no kind, class and fields")


def _of_class(form: str, name: str, parts: Mapping[str, Structure]) -> Structure:
    fields = tuple(parts)
    if not all(map(_is_name, fields)):
        raise ArtifactError(f"there is no class {name[:80]!r} of such fields")
    if form == "transformers":
        kind = _output_class(name, fields)
        fields = tuple(field.name for field in dataclasses.fields(kind))
        nothing = Structure(type(None))
        return Structure(kind, fields, tuple(parts.get(field, nothing) for field in fields))
    if form == "packed":
        if (name, fields) != (PackedSequence.__name__, PackedSequence._fields):
            raise ArtifactError(f"there is no packed sequence of the fields {', '.join(fields)}")
        return Structure(PackedSequence, fields, tuple(parts.values()))
    if form not in ("tuple", "dataclass", "mapping") or not _is_name(name):
        raise ArtifactError(f"there is no class {name[:80]!r} of such fields")
    kind = stand_ins.fields_class(form, name, fields)
    return Structure(kind, fields, tuple(parts.values()))


def _is_name(text: str) -> bool:
    """Whether ``text`` can name a class or field, and none of Python's own."""
    return text.isidentifier() and not keyword.iskeyword(text) and not text.startswith("_")


def _output_class(name: str, fields: tuple[str, ...]) -> Any:
    own = _OWN_OUTPUTS.fullmatch(name)
    if own is None and not _is_name(name):
        raise ArtifactError(f"there is no class {name[:80]!r} of such fields")
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
