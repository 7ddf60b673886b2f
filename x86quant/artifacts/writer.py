"""``save``: a model as one file of plain data."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from x86quant.artifacts.file import container
from x86quant.artifacts.file.stored_tensors import TensorWriter
from x86quant.artifacts.prepared_model import (
    example_of,
    gives_the_same,
    ready,
    was_quantized,
)
from x86quant.artifacts.reader import from_bytes
from x86quant.artifacts.records import forms
from x86quant.artifacts.records.calls import is_constant, takes_others
from x86quant.calling.call import Call
from x86quant.calling.state import state_kept
from x86quant.calling.wording import listed
from x86quant.compiled import GuardedModule
from x86quant.compiled.block_graphs import blocks_of, layers_alone
from x86quant.errors import ArtifactError, X86QuantWarning, first_line
from x86quant.files import write_aside
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
