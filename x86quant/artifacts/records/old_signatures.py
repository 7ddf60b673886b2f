"""How files of earlier versions say how a graph is called: a "signature" within the graph."""

from __future__ import annotations

import inspect
from typing import Any

from x86quant.artifacts.file.values import check_keys, read_conditions, typed
from x86quant.artifacts.records.calls import check_outputs, read_structure
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.errors import ArtifactError
from x86quant.forms.call_form import CallForm, Structure
from x86quant.forms.guard import Guard, GuardedInput

_ENTRIES = {"parameters", "positional", "given", "defaults", "result", "conditions"}


def read_signature(content: object, graph: CompiledModule) -> GuardedModule:
    """``graph`` behind the signature that a file has of it.

    Raises:
        ArtifactError: it is nothing like one.
    """
    found = typed(dict, content, "a signature")
    check_keys("a signature", found, _ENTRIES)
    given, defaults, results = (read_structure(found[k]) for k in ("given", "defaults", "result"))
    if given.kind is not dict or defaults.kind is not dict or defaults.leaves:
        raise ArtifactError("the arguments of its signature are no dicts")
    check_outputs(results, graph.graph_module)
    inputs = [node for node in graph.graph_module.graph.nodes if node.op == "placeholder"]
    if given.leaves != len(inputs):
        raise ArtifactError(f"the arguments of its signature are not its {len(inputs)} inputs")
    arguments = dict(zip(given.keys, given.parts, strict=True))
    constants = dict(zip(defaults.keys, defaults.parts, strict=True))
    signature = _signature(found, arguments, constants)
    if [name for name in signature.parameters if name in arguments] != [*arguments]:
        raise ArtifactError("the arguments of its signature are not in order")
    parts = tuple({**arguments, **constants}[name] for name in signature.parameters)
    structure = Structure(dict, tuple(signature.parameters), parts)
    specs = []
    for node in inputs:
        shape, dtype = node.meta.get("shape"), node.meta.get("input_dtype")
        if shape is None or dtype is None:
            raise ArtifactError("a graph with a signature has an input that is not described")
        specs.append(GuardedInput(str(node.target), dtype, len(shape)))
    conditions = read_conditions(found["conditions"], len(inputs))
    form = CallForm(signature, structure, tuple(spec.name for spec in specs))
    return GuardedModule(graph, None, form, results, Guard(tuple(specs), conditions), strict=True)


def _signature(
    found: dict[str, Any], arguments: dict[str, Structure], constants: dict[str, Structure]
) -> inspect.Signature:
    """The parameters by position, in order, and the others by name."""
    names = typed(list, found["parameters"], "the parameters of its signature")
    if not all(isinstance(name, str) for name in names):
        raise ArtifactError("the parameters of its signature are no names")
    known = {*arguments, *constants}
    positional = [name for name in names if name in known]
    first = typed(int, found["positional"], "the positional parameters of its signature")
    if not 0 <= first <= len(names):
        raise ArtifactError("the positional parameters of its signature are no number")
    # An argument behind one that may be left out can be given by position, but has to be given.
    if [n for n in positional if n in arguments] != [n for n in arguments if n in positional]:
        positional = []  # the graph takes its inputs in another order than the model
    optional = next((i for i, name in enumerate(positional) if name in constants), len(positional))
    by_name = [n for n in positional[optional:] if n in arguments]
    rest = [name for name in (*arguments, *constants) if name not in positional]
    parameters = []
    for name in (*positional, *rest):
        last = name in rest or name in by_name
        kind = inspect.Parameter.KEYWORD_ONLY if last else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = constants[name].fill(()) if name in constants else inspect.Parameter.empty
        try:
            parameters.append(inspect.Parameter(name, kind, default=default))
        except ValueError as error:
            raise ArtifactError(f"a parameter of its signature is wrong: {error}") from error
    parameters.sort(key=lambda p: p.kind)
    try:
        return inspect.Signature(parameters)
    except ValueError as error:
        raise ArtifactError(f"the parameters of its signature are wrong: {error}") from error
