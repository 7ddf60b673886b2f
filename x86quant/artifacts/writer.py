"""``save``: a model as one file of plain data."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Tracer

from x86quant.artifacts.captured import capture
from x86quant.artifacts.file import container
from x86quant.artifacts.file.stored_tensors import TensorWriter
from x86quant.artifacts.reader import from_bytes
from x86quant.artifacts.records import forms, transformers_models
from x86quant.artifacts.records.calls import is_constant, takes_others
from x86quant.artifacts.records.forms import is_replaced
from x86quant.artifacts.records.modules import KINDS, hooks_within
from x86quant.calling.call import Call
from x86quant.calling.differences import SAME_ARITHMETIC, difference
from x86quant.calling.running import run
from x86quant.calling.state import state_kept
from x86quant.calling.wording import listed
from x86quant.capture.variants import takes, variants
from x86quant.compiled import CompiledModule, GuardedModule
from x86quant.compiled.block_graphs import blocks_of, layers_alone
from x86quant.errors import ArtifactError, UnsupportedError, X86QuantWarning, first_line
from x86quant.files import write_aside
from x86quant.graph_sources import forgotten_with_their_graphs
from x86quant.lowering.from_export import flat
from x86quant.version import __version__


def save(
    model: nn.Module | ExportedProgram,
    path: str | os.PathLike[str],
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` to the file ``path``, all of it or nothing.

    Weights are written unpacked: ``load`` packs them for the CPU that it runs on. A model
    that is no single graph is exported with free sizes and saved as one. Where that cannot be, the
    file holds the int8 layers and tensors, and ``load`` needs the model's class: it builds those of
    transformers by itself, any other is given to it.

    Args:
        model: what ``compile``, ``quantize`` or ``to_dynamic`` returned; a graph module; an
            exported program; or any module in eval mode that torch.fx or torch.export can trace.
        path: the file to write or replace.
        example_inputs: the arguments of a call, by position or as a mapping by name; by default
            those that ``quantize`` kept of its calibration data.
        metadata: anything JSON can hold, to be kept with the model; ``describe`` returns it.

    Raises:
        ArtifactError: the model holds something that has no form in an artifact; the message
            names it and what to do.
    """
    target = Path(path)
    with forgotten_with_their_graphs():
        data = to_bytes(model, example_inputs, metadata)
    write_aside(target, data)


def to_bytes(
    model: nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """What ``save`` writes."""
    if not isinstance(model, nn.Module):
        return _bytes_of(model, example_inputs, metadata)
    with state_kept(model):  # it runs, to see that what was written does the same
        return _bytes_of(model, example_inputs, metadata)


def _bytes_of(
    model: nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
) -> bytes:
    plain = _plain(metadata or {})
    example = example_of(model, example_inputs)
    whole, why = ready(model, example)
    if whole is not None:
        try:
            data = _packed(whole, plain)
        except ArtifactError as error:
            if whole is model or not isinstance(model, nn.Module) or not was_quantized(model):
                raise
            whole, why = None, str(error)
    if not why and not (isinstance(model, nn.Module) and _takes_more(model, whole)):
        from_bytes(data)  # whatever is written loads
        return data
    assert isinstance(model, nn.Module)
    return _with_class(model, whole, why, example, plain)


def _takes_more(model: nn.Module, whole: nn.Module | None) -> bool:
    """Whether a quantized ``model`` has arguments that its graph only takes as in the example.

    The graph in a guarded one holds for those arguments alone, too; its float model takes others.
    """
    if isinstance(model, GuardedModule):
        return not model.strict and takes_others(model.form)
    constants = isinstance(whole, GuardedModule) and any(
        map(is_constant, whole.form.arguments.parts)
    )
    return constants and was_quantized(model)


def _with_class(
    model: nn.Module,
    whole: nn.Module | None,
    why: str,
    example: Call | None,
    metadata: dict[str, Any],
) -> bytes:
    """A file for a model whose class is needed to load it, or at least to load all of it."""
    data = _packed(model, metadata)
    content = from_bytes(data)[1]
    if whole is not None and content.needs is not None:
        data = _packed((whole, model), metadata)
        content = from_bytes(data)[1]
    else:
        whole = None  # a graph for some calls adds nothing to a class that is known
    skeleton = getattr(model, "original", None) or model
    loaded = content.build(None if content.needs is None and whole is None else skeleton)
    if example is not None:
        _check_loaded(model, loaded, example)
    if lost := _lost_graphs(model, loaded):
        _warn(
            f"fused graphs of {listed(lost)} call what has no form in a file: what is loaded runs "
            "the layers one by one, which is slower"
        )
    kind = type(skeleton).__name__
    how = f"x86quant.load(path, model={kind}(...))"
    if whole is not None and why:
        _warn(f"{why}: it raises at others, but loaded with {how} it takes all that the model does")
    elif content.needs is not None:
        _warn(f"the file holds the layers of {kind} but not its code ({why}): load it with {how}")
    return data


def _check_loaded(model: nn.Module, loaded: nn.Module, example: Call) -> None:
    """Raise ArtifactError unless ``loaded`` does what ``model`` does."""
    try:
        with contextlib.ExitStack() as stack:
            for one in (model, loaded) if _lost_graphs(model, loaded) else ():
                stack.enter_context(layers_alone(one))
            same = gives_the_same(model, loaded, example)
    except Exception as error:  # of the model's own code
        raise ArtifactError(f"what is loaded would fail: {first_line(error)}") from error
    if same is False:
        raise ArtifactError(
            "what is loaded would give other results: the model computes with attributes that are "
            "neither parameters nor buffers"
        )


def _lost_graphs(model: nn.Module, loaded: nn.Module) -> list[str]:
    """The modules of ``model`` that have graphs which are not in the file."""
    kept = {name: blocks_of(module) for name, module in loaded.named_modules()}
    return [
        name or "the whole model"
        for name, module in model.named_modules()
        if (blocks := blocks_of(module)) is not None
        and ((other := kept.get(name)) is None or len(other.graphs) < len(blocks.graphs))
    ]


def _warn(message: str) -> None:
    warnings.warn(message, X86QuantWarning, stacklevel=6)


def _packed(model: nn.Module | tuple[nn.Module, nn.Module], metadata: dict[str, Any]) -> bytes:
    tensors = TensorWriter()
    manifest = {
        "x86quant": __version__,
        "torch": str(torch.__version__),
        "metadata": metadata,
        "model": forms.write(model, tensors),
        "orders": tensors.orders,
    }
    if tensors.sparse:
        manifest["sparse"] = tensors.sparse
    return container.pack(manifest, tensors.stored)


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``metadata`` as JSON gives it back."""
    try:
        found = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"metadata must be what JSON can hold ({error}); turn other values into strings, "
            "numbers, lists or dicts"
        ) from error
    if found != dict(metadata):
        raise ArtifactError(
            "metadata would change in JSON: use strings as keys, and lists in place of tuples"
        )
    plain: dict[str, Any] = found
    return plain


# --- what of a model is written: a graph for all of it where there is one, else its parts ---

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
    if any(blocks_of(module) is not None for module in model.modules()):
        return _fused(model, example)
    try:
        graph, missing = _traced(model, example)
        if missing:
            return graph, missing
        return _with_other_forms(model, graph)
    except ArtifactError as error:
        if not quantized:
            raise
        return None, str(error)


def _fused(model: nn.Module, example: Call | None) -> tuple[GuardedModule | None, str]:
    """The fused graphs of all of ``model``, which an export would take apart, if it has such.

    Returns:
        These, and which calls that the model takes they do not hold for; empty if there are none.
    """
    blocks = blocks_of(model)
    if blocks is None or blocks.token_step is not None or hooks_within(model):
        return None, "parts of it run as fused graphs, which a graph of all of it would not hold"
    whole = GuardedModule.of(blocks.graphs)
    calls = list(getattr(getattr(model, "quantization", None), "other_calls", ()))
    if example is not None:
        calls += variants([example], functools.partial(takes, model))
    for call in calls:
        if blocks.graph_for(call.args, call.kwargs) is None and takes(model, call):
            return whole, f"its graph does not hold for inputs of {call}"
    return whole, ""


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
        graph.others.extend((other.alone(), *other.others))
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
