"""``save``: a model as one file of plain data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from x86quant.artifacts import container, modules
from x86quant.artifacts.allowed import ATTRIBUTES, FUNCTIONS, METHODS
from x86quant.artifacts.graphs import graph_of
from x86quant.artifacts.reader import from_bytes
from x86quant.artifacts.values import encode
from x86quant.compiled import CompiledModule
from x86quant.errors import ArtifactError
from x86quant.files import write_aside
from x86quant.lowering import FloatNode
from x86quant.lowering.graph_tools import attribute, label, own_call
from x86quant.lowering.passes import Report
from x86quant.version import __version__

_REMEDY = (
    "keep that part of the model out of what you save, or spell it with ops on the list in "
    "docs/artifacts.md"
)


def save(
    model: nn.Module | ExportedProgram,
    path: str | os.PathLike[str],
    *,
    example_inputs: Sequence[Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model`` to the file ``path``, all of it or nothing.

    Weights are written unpacked: whoever loads the file packs them for the CPU at hand.

    Args:
        model: what ``compile`` or ``quantize`` returned; a graph module; an exported program; or
            any module in eval mode that torch.fx can trace (or torch.export, given inputs).
        path: the file to write or replace.
        example_inputs: for a module that has to be traced: inputs to check the traced graph on.
        metadata: anything JSON can hold, to be kept with the model; ``describe`` returns it.

    Raises:
        ArtifactError: the model holds something that has no form in an artifact; the message
            names it and what to do.
    """
    data = to_bytes(model, example_inputs, metadata)
    from_bytes(data)  # whatever is written loads
    write_aside(Path(path), data)


def to_bytes(
    model: nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """What ``save`` writes."""
    writer = _Writer(graph_of(model, example_inputs))
    manifest = {
        **_about(model, metadata),
        "nodes": [writer.node(node) for node in writer.root.graph.nodes],
        "attributes": writer.attributes,
        "modules": writer.modules,
        "orders": writer.tensors.orders,
    }
    return container.pack(manifest, writer.tensors.stored)


def _about(model: object, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    reports: tuple[Report, ...] = ()
    float_nodes: tuple[FloatNode, ...] = ()
    if isinstance(model, CompiledModule):
        reports, float_nodes = model.reports, model.float_nodes
    return {
        "x86quant": __version__,
        "torch": str(torch.__version__),
        "metadata": _plain(metadata or {}),
        "reports": [[r.name, r.changed, r.description] for r in reports],
        "float_nodes": [[f.name, f.op, f.layer, f.reason] for f in float_nodes],
    }


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


class _Tensors:
    """The tensors of a file. One that is used in several places is stored once."""

    def __init__(self) -> None:
        self.stored: dict[str, torch.Tensor] = {}
        #: For a tensor that is dense in another order of dimensions: that order.
        self.orders: dict[str, list[int]] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._alive: list[torch.Tensor] = []  # an address identifies a tensor only while it lives

    def add(self, hint: str, tensor: torch.Tensor) -> str:
        """The name under which ``tensor`` is stored."""
        if tensor.layout != torch.strided or tensor.dtype not in container.STORABLE:
            raise ArtifactError(
                f"the tensor {hint} is {tensor.layout} {tensor.dtype}, which has no form in an "
                "artifact; use plain tensors (a stock-converted model: x86quant.compile it first)"
            )
        if tensor.device.type != "cpu":
            raise ArtifactError(f"the tensor {hint} is on {tensor.device}; call model.cpu() first")
        plain = tensor.detach()
        key = (plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        if plain.numel() and key in self._names:
            return self._names[key]
        self._names[key] = hint
        self._alive.append(plain)
        order = _memory_order(plain)
        self.stored[hint] = plain.permute(order).clone(memory_format=torch.contiguous_format)
        if order != sorted(order):
            self.orders[hint] = order
        return hint


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions from the outermost in memory to the innermost, if it is dense at all."""
    strides = tensor.stride()
    dims = list(range(tensor.dim()))
    order = sorted(dims, key=lambda d: -strides[d])
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else dims


class _Writer:
    """Writes down one graph module."""

    def __init__(self, root: GraphModule) -> None:
        self.root = root
        self.tensors = _Tensors()
        self.attributes: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}
        self._index = {node: i for i, node in enumerate(root.graph.nodes)}

    def node(self, node: Node) -> dict[str, Any]:
        """``node`` as JSON; errors name it."""
        try:
            args, kwargs = _arguments(node)
            return {
                "name": node.name,
                "op": node.op,
                "target": self._target(node),
                "args": [encode(arg, self._index) for arg in args],
                "kwargs": {key: encode(arg, self._index) for key, arg in kwargs.items()},
                "meta": _meta(node),
            }
        except ArtifactError as error:
            raise ArtifactError(
                f"node {node.name} ({label(node)}) cannot be saved: {error}; {_REMEDY}"
            ) from error

    def _target(self, node: Node) -> str:
        target = str(node.target)
        if node.op == "call_function":
            name = FUNCTIONS.name(node.target)
            if name is None:
                shown = getattr(node.target, "__name__", target)
                raise ArtifactError(f"the function {shown} is not one an artifact may call")
            if node.target is getattr and node.args[1] not in ATTRIBUTES:
                raise ArtifactError(f"the attribute {node.args[1]!r} may not be read")
            return name
        if node.op == "call_method" and target not in METHODS:
            raise ArtifactError(f"the method {target} is not one an artifact may call")
        if node.op == "call_module" and target not in self.modules:
            self.modules[target] = self._module(target)
        if node.op == "get_attr" and target not in self.attributes:
            self.attributes[target] = self._attribute(target)
        return target

    def _module(self, path: str) -> dict[str, Any]:
        module = self.root.get_submodule(path)
        name, arguments = modules.describe(module)
        state = {
            key: self.tensors.add(f"{path}.{key}", tensor)
            for key, tensor in module.state_dict().items()
        }
        return {"class": name, "arguments": arguments, "tensors": state}

    def _attribute(self, path: str) -> Any:
        value = attribute(self.root, path)
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensors.add(path, value)}
        return {"value": encode(value, {})}


def _arguments(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``node``; those of x86quant ops all by name, defaults filled in."""
    call = own_call(node)
    return (node.args, dict(node.kwargs)) if call is None else ((), call[1])


def _meta(node: Node) -> dict[str, Any]:
    """What reports and the runtime read off a node."""
    meta = node.meta
    found: dict[str, Any] = {
        key: meta[key] for key in ("layer", "source", "why") if isinstance(meta.get(key), str)
    }
    if meta.get("shape") is not None:
        found["shape"] = [int(size) for size in meta["shape"]]
    if "qparams" in meta and node.op != "placeholder":
        found["qparams"] = [meta["qparams"].scale, meta["qparams"].zero_point]
    if isinstance(meta.get("input_dtype"), torch.dtype):
        found["input_dtype"] = str(meta["input_dtype"]).removeprefix("torch.")
    return found
