"""A ``GuardedModule`` as plain data: its graph, how it is called, which calls the graph holds for.

The float module that answers other calls is written too if sizes or numbers can make a call one of
these. The caller of ``load`` passes a module of that class; without it such calls are refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from x86quant.artifacts.capture.structures import Leaf, fill, leaves_of, split
from x86quant.artifacts.file import container
from x86quant.artifacts.file.content import Content
from x86quant.artifacts.file.stored_tensors import TensorWriter
from x86quant.artifacts.file.typed import check_keys, read_conditions, typed
from x86quant.artifacts.file.values import decode, encode
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.errors import ArtifactError, UnsupportedError
from x86quant.forms.call_form import CallForm, Structure, take_apart
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.forms.size_conditions import sizes_in

Write = Callable[[nn.Module, TensorWriter], dict[str, Any]]
Read = Callable[[object], Content]

_ENTRIES = {"compiled", "parameters", "arguments", "names", "result", "guard", "strict", "original"}
_KINDS = {kind.name: kind for kind in inspect._ParameterKind}
_DTYPES = {str(d).removeprefix("torch."): d for d in container.STORABLE}
_MAX_RANK = 64


def write_guarded(module: GuardedModule, tensors: TensorWriter, write: Write) -> dict[str, Any]:
    """``module`` as JSON; ``write`` gives the records of the modules in it."""
    guard, original = module.guard, module.original
    outside = guard.conditions or any(x.fixed for x in guard.inputs) or takes_others(module.form)
    kept = original if outside and not module.strict else None
    return {
        "compiled": write(module.compiled, tensors),
        **write_call(module.form, module.results, guard),
        "strict": kept is None,
        "original": None if kept is None else write(kept, tensors),
    }


def write_call(form: CallForm, results: Structure, guard: Guard) -> dict[str, Any]:
    """How a graph is called, what it returns and which calls it holds for, as JSON."""
    return {
        "parameters": [_parameter(p) for p in form.signature.parameters.values()],
        "arguments": _structure(form.arguments, "an argument"),
        "names": list(form.names),
        "result": _structure(results, "its result"),
        "guard": {
            "inputs": [_input(x) for x in guard.inputs],
            "conditions": list(guard.conditions),
        },
    }


def read_guarded(content: dict[str, Any], read: Read) -> Content:
    """What ``write_guarded`` wrote; ``read`` reads the records in it."""
    check_keys("a guarded graph", content, _ENTRIES)
    compiled = read(content["compiled"]).whole
    if not isinstance(compiled, CompiledModule):
        raise ArtifactError("a guarded graph is no graph")
    arguments, results = (_read_structure(content[key]) for key in ("arguments", "result"))
    names = typed(list, content["names"], "names")
    inputs = sum(node.op == "placeholder" for node in compiled.graph_module.graph.nodes)
    if not all(isinstance(n, str) for n in names) or not arguments.leaves == len(names) == inputs:
        raise ArtifactError(f"a guarded graph of {inputs} inputs is called with others")
    form = CallForm(_signature(content["parameters"]), arguments, tuple(names))
    guard = _read_guard(content["guard"], inputs)
    strict = typed(bool, content["strict"], "strict")
    original = None if content["original"] is None else read(content["original"])

    def build(skeleton: nn.Module | None) -> nn.Module:
        """Without a skeleton there is nothing that could answer other calls."""
        if isinstance(skeleton, GuardedModule):  # of a model that was quantized before
            skeleton = skeleton.original
        if original is not None and (skeleton is not None or original.needs is None):
            skeleton = original.build(skeleton)
        elif skeleton is not None:  # for its attributes: nobody is to compute with its weights
            skeleton = copy.deepcopy(skeleton).to("meta")
        return GuardedModule(compiled, skeleton, form, results, guard, strict=strict)

    return Content(build, parts=(compiled,))


def takes_others(form: CallForm) -> bool:
    """Whether a list is given, or a number that is no default: lengths and sizes vary."""

    def found(structure: Structure) -> bool:
        return structure.kind in (int, float, list) or any(map(found, structure.parts))

    defaults = {name: p.default for name, p in form.signature.parameters.items()}
    arguments = zip(form.arguments.keys, form.arguments.parts, strict=True)
    return any(found(part) and part.value is not defaults[name] for name, part in arguments)


# --- how it is called ---


def _parameter(parameter: inspect.Parameter) -> list[Any]:
    has_default = parameter.default is not parameter.empty
    default = _plain(parameter.default, [], "a default") if has_default else None
    return [parameter.name, parameter.kind.name, has_default, encode(default, {})]


def _signature(rows: object) -> inspect.Signature:
    found = []
    for row in typed(list, rows, "parameters"):
        if not isinstance(row, list) or len(row) != 4 or str(row[1]) not in _KINDS:
            raise ArtifactError("a parameter of a guarded graph is not as it should be")
        name, kind, has_default, default = row
        value = decode(default, ()) if has_default is True else inspect.Parameter.empty
        try:
            found.append(inspect.Parameter(name, _KINDS[str(kind)], default=value))
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"a parameter of a guarded graph is wrong: {error}") from error
    try:
        return inspect.Signature(found)
    except ValueError as error:
        raise ArtifactError(f"the parameters of a guarded graph are wrong: {error}") from error


def _plain(value: Any, leaves: list[Any], what: str) -> Any:
    return split(value, leaves, lambda x: isinstance(x, Leaf), what)


def _structure(structure: Structure, what: str) -> Any:
    value = structure.fill([Leaf(number) for number in range(structure.leaves)])
    return encode(_plain(value, [], what), {})


def _read_structure(content: object) -> Structure:
    value = decode(content, ())
    if leaves_of(value) != list(range(len(leaves_of(value)))):
        raise ArtifactError("the tensors of a guarded graph are not in order")
    try:
        return take_apart(_classes(value), lambda x: isinstance(x, Leaf))[0]
    except UnsupportedError as error:
        raise ArtifactError(str(error)) from error


def _classes(value: Any) -> Any:
    """``value`` with objects of their classes in place of named fields."""
    return fill(value, [Leaf(number) for number in leaves_of(value)])


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
    if not isinstance(dtype, str) or dtype not in _DTYPES:
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
        _DTYPES[dtype],
        rank,
        tuple((dim, size) for dim, size in pairs),
        None if single is None else frozenset(single),
    )


def _is_dim(value: object, rank: int) -> bool:
    return type(value) is int and 0 <= value < rank
