"""The graph that stands for a model: its own, or one that tracing or exporting finds."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Tracer
from torch.utils import _pytree as pytree

from x86quant.artifacts.modules import KINDS
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.errors import ArtifactError, UnsupportedError
from x86quant.lowering.from_export import flat

_REMEDY = (
    "export it yourself, torch.export.export(model, inputs, dynamic_shapes=...), "
    "and save what that returns"
)


def graph_of(
    model: nn.Module | ExportedProgram, example_inputs: Sequence[Any] | None
) -> GraphModule:
    """The graph module to write; its tensors are the model's own."""
    if isinstance(model, ExportedProgram):
        return _flat(model.module(check_guards=False))
    if isinstance(model, CompiledModule):
        return model.graph_module
    guarded = [path for path, m in model.named_modules() if isinstance(m, GuardedModule)]
    if guarded:
        path = ".".join(filter(None, ("model", guarded[0])))
        raise ArtifactError(
            f"{path} is a GuardedModule: its int8 graph holds for some calls only, and an artifact "
            f"cannot check that; {path}.compiled is the graph alone, from tensors to a tuple of "
            "tensors, which you can save if all calls are like those of calibration"
        )
    if model.training:
        raise ArtifactError("the model is in training mode; call model.eval() first")
    if isinstance(model, GraphModule):
        return _described(_flat(model), example_inputs)
    traced = _traced(model, example_inputs)
    if example_inputs is not None:
        _check_equal(model, traced, example_inputs)
    return _described(traced, example_inputs)


def _traced(model: nn.Module, example_inputs: Sequence[Any] | None) -> GraphModule:
    """``model`` as a graph, by torch.fx, or by torch.export where that cannot."""
    parameters = inspect.signature(model.forward).parameters.values()
    if example_inputs is None and any(p.default is not p.empty for p in parameters):
        raise ArtifactError(
            f"{type(model).__name__}.forward has optional arguments; pass example_inputs, "
            "so that it is known which are given"
        )
    if example_inputs is None or len(parameters) == len(example_inputs):
        try:
            return GraphModule(model, _Leaves().trace(model))
        except (torch.fx.proxy.TraceError, TypeError, ValueError, AttributeError) as error:
            if example_inputs is None:
                raise ArtifactError(
                    f"torch.fx cannot trace {type(model).__name__} ({error}); pass "
                    f"example_inputs to have it exported, or {_REMEDY}"
                ) from error
    try:
        return _flat(torch.export.export(model, tuple(example_inputs)).module(check_guards=False))
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ArtifactError(f"{type(model).__name__} cannot be exported: {error}") from error


class _Leaves(Tracer):
    """Keeps the layers whole that an artifact can hold as such."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in KINDS


def _flat(gm: GraphModule) -> GraphModule:
    try:
        return flat(gm)
    except UnsupportedError as error:
        raise ArtifactError(str(error)) from error


def _described(gm: GraphModule, example_inputs: Sequence[Any] | None) -> GraphModule:
    """``gm``, its inputs described by the examples, so that a loaded model checks what it gets."""
    if example_inputs is None:
        return gm
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, val_map={}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, example_inputs, strict=False):
        if isinstance(value, torch.Tensor):
            node.meta.update(shape=tuple(value.shape), input_dtype=value.dtype)
    return GraphModule(gm, graph)


def _check_equal(model: nn.Module, traced: GraphModule, example_inputs: Sequence[Any]) -> None:
    """The graph computes what the model does: tracing may miss what depends on values."""
    with torch.no_grad():
        expected = pytree.tree_leaves(model(*example_inputs))
        found = pytree.tree_leaves(traced(*example_inputs))
    same = len(expected) == len(found) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(expected, found, strict=True)
    )
    if not same:
        raise ArtifactError(
            f"the graph traced from {type(model).__name__} gives other results than the model; "
            f"{_REMEDY}"
        )
