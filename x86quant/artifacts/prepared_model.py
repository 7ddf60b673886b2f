"""What of a model is written: a graph for all of it where there is one, else its parts."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Tracer

from x86quant.artifacts.captured import capture
from x86quant.artifacts.records import transformers_models
from x86quant.artifacts.records.forms import is_replaced
from x86quant.artifacts.records.modules import KINDS, hooks_within
from x86quant.calling.call import Call
from x86quant.calling.differences import SAME_ARITHMETIC, difference
from x86quant.calling.running import run
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.errors import ArtifactError, UnsupportedError, X86QuantWarning
from x86quant.lowering.from_export import flat

_REMEDY = (
    "export it yourself, torch.export.export(model, inputs, dynamic_shapes=...), "
    "and save what that returns"
)


def example_of(
    model: object, example_inputs: Sequence[Any] | Mapping[str, Any] | None
) -> Call | None:
    """What was given, or what ``quantize`` kept, of a call of ``model``."""
    if isinstance(example_inputs, Mapping):
        return Call((), example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return Call((example_inputs,))
    if example_inputs is not None:
        return Call(tuple(example_inputs))
    kept = getattr(getattr(model, "quantization", None), "example", None)
    return None if kept is None else Call(tuple(kept.args), dict(kept.kwargs))


def ready(
    model: nn.Module | ExportedProgram, example: Call | None
) -> tuple[CompiledModule | GuardedModule | None, str]:
    """A graph for all of ``model``, or one for each range of sizes, or None; and, unless that graph
    does all that the model does, why its class is needed.

    Raises:
        ArtifactError: there is no graph, nor would the class help.
    """
    if isinstance(model, CompiledModule) or (
        isinstance(model, GuardedModule) and model.original is None and model.strict
    ):
        if hooks_within(model):
            raise ArtifactError("its hooks have no form in an artifact: remove them first")
        return model, ""
    if isinstance(model, ExportedProgram):
        return CompiledModule(_flat(model.module(check_guards=False))), ""
    if not isinstance(model, nn.Module):
        raise ArtifactError(f"a model must be an nn.Module, not {type(model).__name__}")
    if model.training:
        raise ArtifactError("the model is in training mode; call model.eval() first")
    if isinstance(model, GraphModule):
        return CompiledModule(_described(_flat(model), example)), ""
    quantized = was_quantized(model)
    if transformers_models.is_one(model):
        return None, transformers_models.why_given(model)
    try:
        graph, missing = _traced(model, example)
        if missing:
            return graph, missing
        return _with_other_forms(model, graph)
    except ArtifactError as error:
        if not quantized:
            raise
        return None, str(error)


def _with_other_forms(
    model: nn.Module, graph: CompiledModule | GuardedModule
) -> tuple[CompiledModule | GuardedModule, str]:
    """``graph`` with graphs for the other forms of calls that ``model`` was quantized for.

    Returns:
        That, and which form there is no graph for; empty if there is one for each.
    """
    missing = ""
    for call in getattr(getattr(model, "quantization", None), "other_calls", ()):
        kwargs = dict(call.kwargs)
        if not isinstance(graph, GuardedModule) or graph.takes_form(call.args, kwargs):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", X86QuantWarning)  # that it runs in float
                other, fewer = capture(model, call.args, kwargs)
        except ArtifactError as error:
            reason = graph.form.refusal(call.args, kwargs)
            missing = missing or (
                f"calibration showed calls of another form ({reason}), which cannot be a graph "
                f"({error})"
            )
            continue
        missing = missing or fewer
        graph.others.extend((other, *other.others))
        other.others = nn.ModuleList()
    return graph, missing


def was_quantized(model: nn.Module) -> bool:
    """Whether ``quantize`` returned ``model``, or put anything into it."""
    return hasattr(model, "quantization") or any(
        is_replaced(m) and not isinstance(m, nn.Identity) for m in model.modules()
    )


def _traced(model: nn.Module, example: Call | None) -> tuple[CompiledModule | GuardedModule, str]:
    """``model`` as a graph, by torch.export; without an example, to compare on, by torch.fx."""
    if example is not None:
        return capture(model, example.args, example.kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.default is not p.empty for p in parameters):
        raise ArtifactError(
            f"{type(model).__name__}.forward has optional arguments; pass example_inputs, "
            "so that it is known which are given"
        )
    return CompiledModule(_by_fx(model)), ""


def _by_fx(model: nn.Module) -> GraphModule:
    try:
        return GraphModule(model, _Leaves().trace(model))
    except Exception as error:  # tracing runs the user's own code, which may raise anything
        raise ArtifactError(
            f"torch.fx cannot trace {type(model).__name__} ({error}); pass "
            f"example_inputs to have it exported, or {_REMEDY}"
        ) from error


class _Leaves(Tracer):
    """Keeps the layers whole that an artifact can hold as such, and compiled parts."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in KINDS or isinstance(m, CompiledModule)


def _flat(gm: GraphModule) -> GraphModule:
    try:
        return flat(gm)
    except UnsupportedError as error:
        raise ArtifactError(str(error)) from error


def _described(gm: GraphModule, example: Call | None) -> GraphModule:
    """``gm``, its inputs described by the example, so that a loaded model checks what it gets."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, val_map={}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, () if example is None else example.args, strict=False):
        if isinstance(value, torch.Tensor):
            node.meta.update(shape=tuple(value.shape), input_dtype=value.dtype)
    return GraphModule(gm, graph)


def gives_the_same(model: nn.Module, other: nn.Module, example: Call) -> bool | None:
    """Whether ``other`` computes what the model does; None where it returns another class."""
    one, two = run(model, example), run(other, example)
    if type(one) is not type(two):
        return None
    try:
        return difference(one, two, SAME_ARITHMETIC) is None
    except UnsupportedError:  # of a class that cannot be looked into
        return None
