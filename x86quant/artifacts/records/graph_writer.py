"""A graph as plain data, and a compiled model around it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from x86quant.artifacts.file import container
from x86quant.artifacts.file.stored_tensors import TensorWriter
from x86quant.artifacts.file.values import encode
from x86quant.artifacts.records import modules
from x86quant.artifacts.records.allowed import (
    ATTRIBUTES,
    FUNCTIONS,
    METHODS,
    WRITING_FUNCTIONS,
    WRITING_METHODS,
)
from x86quant.compiled import CompiledModule
from x86quant.errors import ArtifactError
from x86quant.lowering.graph_tools import attribute, label, own_call
from x86quant.lowering.mutation import OnCopy

_REMEDY = (
    "keep that part of the model out of what you save, or spell it with ops on the list in "
    "docs/artifacts.md"
)


def write_graph(model: CompiledModule, tensors: TensorWriter) -> dict[str, Any]:
    """``model`` as JSON; its tensors go to ``tensors``."""
    return {
        **_GraphWriter(model.graph_module, tensors).written(),
        "reports": [[r.name, r.changed, r.description] for r in model.reports],
        "float_nodes": [[f.name, f.op, f.layer, f.reason] for f in model.float_nodes],
        "signature": None,  # earlier versions wrote here how the graph is called
    }


class _GraphWriter:
    """Writes down one graph module."""

    def __init__(
        self, root: GraphModule, tensors: TensorWriter, path: str = "", on_copy: bool = False
    ) -> None:
        self.root = root
        self.tensors = tensors
        self._prefix = f"{path}." if path else ""
        self._on_copy = on_copy
        self.attributes: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}
        self._index = {node: i for i, node in enumerate(root.graph.nodes)}

    def written(self) -> dict[str, Any]:
        """Nodes, and what they refer to."""
        nodes = [self.node(node) for node in self.root.graph.nodes]
        return {"nodes": nodes, "attributes": self.attributes, "modules": self.modules}

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
            if name is None and self._on_copy:
                name = WRITING_FUNCTIONS.name(node.target)
            if name is None:
                shown = getattr(node.target, "__name__", target)
                raise ArtifactError(f"the function {shown} is not one an artifact may call")
            if node.target is getattr and node.args[1] not in ATTRIBUTES:
                raise ArtifactError(f"the attribute {node.args[1]!r} may not be read")
            return name
        writes = self._on_copy and target in WRITING_METHODS
        if node.op == "call_method" and target not in METHODS and not writes:
            raise ArtifactError(f"the method {target} is not one an artifact may call")
        if node.op == "call_module" and target not in self.modules:
            self.modules[target] = self._module(target)
        if node.op == "get_attr" and target not in self.attributes:
            self.attributes[target] = self._attribute(target)
        return target

    def _module(self, path: str) -> dict[str, Any]:
        layer, hint = self.root.get_submodule(path), f"{self._prefix}{path}"
        if isinstance(layer, OnCopy) and not self._on_copy:
            return {
                "on_copy": _GraphWriter(layer.write, self.tensors, hint, on_copy=True).written()
            }
        return modules.write_layer(layer, hint, self.tensors)

    def _attribute(self, path: str) -> Any:
        value = attribute(self.root, path)
        if isinstance(value, torch.Tensor):
            return {"tensor": self.tensors.add(f"{self._prefix}{path}", value)}
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
        if meta["input_dtype"] not in container.STORABLE:
            raise ArtifactError(f"inputs of {meta['input_dtype']} have no form in a file")
        found["input_dtype"] = str(meta["input_dtype"]).removeprefix("torch.")
    return found
