"""The forms that a module can have in a file: how each is recognized, written and read.

A record is a JSON object with the entry "form". Forms may hold records of other modules. To add a
form, append a :class:`Form` to ``FORMS``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from x86quant.artifacts.file.content import Content
from x86quant.artifacts.file.stored_tensors import TensorReader, TensorWriter
from x86quant.artifacts.file.values import check_keys, typed
from x86quant.artifacts.records import modules
from x86quant.artifacts.records.calls import write_call
from x86quant.artifacts.records.graphs import read_graph, write_graph
from x86quant.artifacts.records.guarded_form import read_guarded, write_guarded
from x86quant.artifacts.records.old_signatures import read_signature
from x86quant.artifacts.records.tree import read_tree, write_tree
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.guarded import GuardedGraph
from x86quant.errors import ArtifactError
from x86quant.forms.call_form import CallForm, Structure
from x86quant.forms.guard import Guard
from x86quant.ops.float_type import OTHER_FLOATS, float_type_of, give_float_type

#: Modules within modules within modules; a graph in a tree is two.
_MAX_DEPTH = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One form.

    Attributes:
        name: what the record calls it.
        takes: whether it is the form for what is to be written.
        write: the record of a module; its tensors go to the writer.
        read: the content of a record; the last argument reads records within it.
    """

    name: str
    takes: Callable[[object], bool]
    write: Callable[[Any, TensorWriter], dict[str, Any]]
    read: Callable[[dict[str, Any], TensorReader, Callable[[object], Content]], Content]


def _write_layer(layer: nn.Module, tensors: TensorWriter) -> dict[str, Any]:
    return modules.write_layer(layer, "", tensors)


def _read_layer(
    content: dict[str, Any], tensors: TensorReader, _: Callable[[object], Content]
) -> Content:
    check_keys("a layer", content, {"class", "arguments", "tensors"})
    layer = modules.read_layer(content, tensors)
    return Content(lambda _: layer)


def _read_graph(
    content: dict[str, Any], tensors: TensorReader, _: Callable[[object], Content]
) -> Content:
    graph = read_graph(content, tensors)
    # Files of earlier versions hold a graph together with how it is called.
    signature = content["signature"]
    model = graph if signature is None else read_signature(signature, graph)
    return Content(lambda _: model, parts=(graph,), whole=graph)


def _write_sizes(model: GuardedModule, tensors: TensorWriter) -> dict[str, Any]:
    first = {"form": "guarded", **_write_guarded(model, tensors)}
    return {"models": [first, *(write(graph, tensors) for graph in model.others)]}


def _read_sizes(
    content: dict[str, Any], _: TensorReader, inner: Callable[[object], Content]
) -> Content:
    check_keys("graphs by call", content, {"models"})
    found = [inner(record) for record in typed(list, content["models"], "models")]
    models = [graph.build(None) for graph in found if graph.whole is not None]
    guarded = [model for model in models if isinstance(model, GuardedModule)]
    if len(guarded) != len(found) or not guarded:
        raise ArtifactError("a graph for some calls is no graph, or is not said to be for some")
    first, *others = guarded
    first.others.extend(other.alone() for other in others)
    parts = tuple(part for graph in found for part in graph.parts)
    return Content(lambda _: first, parts=parts, whole=found[0].whole)


def _write_either(models: tuple[nn.Module, nn.Module], tensors: TensorWriter) -> dict[str, Any]:
    graph, model = models
    return {"graph": write(graph, tensors), "class": write(model, tensors)}


def _read_either(
    content: dict[str, Any], _: TensorReader, inner: Callable[[object], Content]
) -> Content:
    check_keys("a graph and a class", content, {"graph", "class"})
    graph, filled = inner(content["graph"]), inner(content["class"])
    if graph.whole is None:
        raise ArtifactError("a graph and a class have no graph")
    return dataclasses.replace(
        graph, build=lambda model: graph.build(None) if model is None else filled.build(model)
    )


def _write_guarded(module: GuardedGraph, tensors: TensorWriter) -> dict[str, Any]:
    return write_guarded(module, tensors, write)


def _read_guarded(
    content: dict[str, Any], _: TensorReader, inner: Callable[[object], Content]
) -> Content:
    return read_guarded(content, inner)


FORMS: list[Form] = [
    # A graph for some calls, and the module that takes them all.
    Form("either", lambda m: isinstance(m, tuple), _write_either, _read_either),
    Form(
        "sizes",
        lambda m: isinstance(m, GuardedModule) and len(m.others) > 0,
        _write_sizes,
        _read_sizes,
    ),
    Form("graph", lambda m: isinstance(m, CompiledModule), write_graph, _read_graph),
    Form("guarded", lambda m: isinstance(m, GuardedGraph), _write_guarded, _read_guarded),
    Form("layer", modules.is_known, _write_layer, _read_layer),
    Form(
        "tree",
        lambda _: True,
        lambda model, tensors: write_tree(model, tensors, write, is_replaced),
        read_tree,
    ),
]


def is_replaced(module: nn.Module) -> bool:
    """Whether a module within a tree is not the user's, but put there by quantization."""
    return isinstance(module, CompiledModule | GuardedModule) or modules.is_int8(module)


def write(module: nn.Module | tuple[nn.Module, nn.Module], tensors: TensorWriter) -> dict[str, Any]:
    """The record of ``module``."""
    form = next(form for form in FORMS if form.takes(module))
    record = {"form": form.name, **form.write(module, tensors)}
    if isinstance(module, nn.Module) and (own := float_type_of(module)) is not torch.float32:
        record["float_type"] = str(own).removeprefix("torch.")
    return record


def check_savable(
    compiled: CompiledModule, called: tuple[CallForm, Structure, Guard] | None
) -> None:
    """Raise ArtifactError unless a graph, and how it is called if that matters, has a form in a
    file.
    """
    write_graph(compiled, TensorWriter(copies=False))
    if called is not None:
        write_call(*called)


def read(record: object, tensors: TensorReader, depth: int = 0) -> Content:
    """The content of ``record``.

    Raises:
        ArtifactError: it is not what ``write`` wrote.
    """
    found = dict(typed(dict, record, "a module"))
    name = found.pop("form", None)
    form = next((form for form in FORMS if form.name == name), None)
    if form is None or depth > _MAX_DEPTH:
        raise ArtifactError(f"a module has the unknown form {str(name)[:80]!r}")
    told = found.pop("float_type", None)
    content = form.read(found, tensors, lambda inner: read(inner, tensors, depth + 1))
    return content if told is None else _of_type(told, content)


def _of_type(told: object, content: Content) -> Content:
    """``content`` of a module that takes and returns a floating type other than float32."""
    types = {str(x).removeprefix("torch."): x for x in OTHER_FLOATS}
    if not isinstance(told, str) or told not in types:
        raise ArtifactError(f"a module has the unknown floating type {str(told)[:80]!r}")

    def build(skeleton: nn.Module | None) -> nn.Module:
        found = content.build(skeleton)
        give_float_type(found, types[told])
        return found

    return dataclasses.replace(content, build=build)
