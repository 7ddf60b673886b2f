"""How a graph is called and which calls it holds for, as plain data."""

from __future__ import annotations

import inspect
from typing import Any

from torch.fx import GraphModule

from x86quant.artifacts.file import container
from x86quant.artifacts.file.typed import check_keys, read_conditions, typed
from x86quant.artifacts.records.structures import read_structure, write_structure
from x86quant.errors import ArtifactError
from x86quant.forms.call_form import CallForm, Structure, take_apart
from x86quant.forms.guard import Guard, GuardedInput
from x86quant.forms.size_conditions import sizes_in

CALL_ENTRIES = {"parameters", "arguments", "names", "result", "guard"}
_KINDS = {kind.name: kind for kind in inspect._ParameterKind}
_DTYPES = {str(d).removeprefix("torch."): d for d in container.STORABLE}
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
