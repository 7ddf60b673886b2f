"""A graph as plain data and back: on reading, everything is checked and nothing of it executed."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.artifacts.file import container
from x86quant.artifacts.file.stored_tensors import TensorReader, TensorWriter
from x86quant.artifacts.file.values import check_keys, decode, encode, typed
from x86quant.artifacts.records import modules
from x86quant.artifacts.records.allowed import (
    ATTRIBUTES,
    FUNCTIONS,
    METHODS,
    WRITING_FUNCTIONS,
    WRITING_METHODS,
)
from x86quant.artifacts.records.calls import DTYPES
from x86quant.compiled import CompiledModule
from x86quant.errors import ArtifactError, UnsupportedError
from x86quant.lowering import FloatNode
from x86quant.lowering.graph_tools import QParams, attribute, is_op, label, own_call
from x86quant.lowering.mutation import OnCopy
from x86quant.lowering.op_spec import check_op, yields_codes
from x86quant.lowering.passes import Report

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


# Names end up in the code that torch.fx generates for a graph: nothing else than names may.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,400}", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9_]{1,400}", re.ASCII)
_MAX_PARTS = 64

_WRITTEN = {"nodes", "attributes", "modules"}
_ENTRIES = {*_WRITTEN, "reports", "float_nodes", "signature"}
_NODE = {"name", "op", "target", "args", "kwargs", "meta"}
_META = {"layer", "source", "why", "shape", "qparams", "input_dtype"}


def read_graph(content: dict[str, Any], tensors: TensorReader) -> CompiledModule:
    """The compiled model that ``write_graph`` wrote."""
    check_keys("the graph", content, _ENTRIES)
    gm = _read_nodes(content, _GraphReader(tensors))
    reports, float_nodes = _reports(content), _float_nodes(content)
    return CompiledModule(gm, reports, float_nodes)


def _read_nodes(content: dict[str, Any], reader: _GraphReader) -> GraphModule:
    """The graph module with the nodes, attributes and modules of ``content``."""
    for path, value in typed(dict, content["attributes"], "attributes").items():
        reader.add_attribute(path, value)
    for path, value in typed(dict, content["modules"], "modules").items():
        reader.add_module(path, value)
    for number, value in enumerate(typed(list, content["nodes"], "nodes")):
        try:
            reader.add_node(value)
        except (ArtifactError, UnsupportedError) as error:
            raise ArtifactError(f"node {number} is not valid: {error}") from error
    return reader.finished()


class _GraphReader:
    """Builds one graph module; that of an ``OnCopy`` may write in place to what it copied."""

    def __init__(self, tensors: TensorReader, on_copy: bool = False) -> None:
        self._tensors = tensors
        self._on_copy = on_copy
        self._root = nn.Module()
        self._paths: dict[str, set[str]] = {"get_attr": set(), "call_module": set()}
        self._graph = Graph()
        self._nodes: list[Node] = []

    # --- constants and layers ---

    def add_attribute(self, path: str, content: object) -> None:
        """Give the root the constant at ``path``."""
        found = typed(dict, content, f"attribute {path[:80]!r}")
        home, name = self._place(path, "get_attr")
        if found.keys() == {"tensor"}:
            home.register_buffer(name, self._tensors.take(found["tensor"]))
        elif found.keys() == {"value"}:
            setattr(home, name, decode(found["value"], ()))
        else:
            raise ArtifactError(f"attribute {path!r} is neither a tensor nor a value")

    def add_module(self, path: str, content: object) -> None:
        """Give the root the layer at ``path``."""
        found = typed(dict, content, f"layer {path[:80]!r}")
        home, name = self._place(path, "call_module")
        if found.keys() == {"on_copy"} and not self._on_copy:
            inner = typed(dict, found["on_copy"], "a write on a copy")
            check_keys("a write on a copy", inner, _WRITTEN)
            write = _read_nodes(inner, _GraphReader(self._tensors, on_copy=True))
            home.add_module(name, OnCopy(write).eval())
            return
        check_keys(f"layer {path[:80]!r}", found, {"class", "arguments", "tensors"})
        home.add_module(name, modules.read_layer(found, self._tensors))

    def _place(self, path: str, op: str) -> tuple[nn.Module, str]:
        """The module that is to hold ``path``, and the name in it, which is free."""
        parts = path.split(".")
        if len(parts) > _MAX_PARTS or not all(map(_PART.fullmatch, parts)):
            raise ArtifactError(f"{path[:80]!r} is not the path of an attribute")
        home = self._root
        for part in parts[:-1]:
            if part not in home._modules:
                self._check_free(home, part, path)
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
            if type(home) is not nn.Module:
                raise ArtifactError(f"{path!r} lies within a layer")
        self._check_free(home, parts[-1], path)
        self._paths[op].add(path)
        return home, parts[-1]

    @staticmethod
    def _check_free(home: nn.Module, name: str, path: str) -> None:
        if hasattr(home, name):
            raise ArtifactError(f"the path {path!r} is taken")

    # --- nodes ---

    def add_node(self, content: object) -> None:
        """Append a node to the graph."""
        found = typed(dict, content, "it")
        check_keys("it", found, _NODE)
        if self._nodes and self._nodes[-1].op == "output":
            raise ArtifactError("it comes after the output")
        name, op = typed(str, found["name"], "name"), typed(str, found["op"], "op")
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            raise ArtifactError(f"{name[:80]!r} is not a name")
        target = self._target(op, typed(str, found["target"], "target"))
        args = tuple(decode(a, self._nodes) for a in typed(list, found["args"], "args"))
        kwargs = {
            key: decode(a, self._nodes) for key, a in typed(dict, found["kwargs"], "kwargs").items()
        }
        if bad := [k for k in kwargs if not _NAME.fullmatch(k) or keyword.iskeyword(k)]:
            raise ArtifactError(f"{bad[0][:80]!r} is not the name of an argument")
        _check_arity(op, target, args, kwargs)
        if kwargs.get("out") is not None:
            raise ArtifactError("it writes to an argument")
        if op == "call_method" and not isinstance(args[0], Node):
            # The code of torch.fx would hold a literal with the method behind it.
            raise ArtifactError("it calls a method of what no node computes")
        node = self._graph.create_node(op, target, args, kwargs, name=name)
        if node.name != name:
            raise ArtifactError(f"the name {name!r} is taken")
        if target is getattr:
            _check_getattr(args, kwargs)
        if _writes(node) and not _is_copied(node.args[0]):
            raise ArtifactError("it writes to what is no copy")
        if is_op(node):
            check_op(node, self._constant)
        self._add_meta(node, typed(dict, found["meta"], "meta"))
        self._nodes.append(node)

    def _target(self, op: str, target: str) -> Any:
        if op == "call_function":
            function = FUNCTIONS.find(target)
            if function is None and self._on_copy:
                function = WRITING_FUNCTIONS.find(target)
            if function is None:
                raise ArtifactError(f"it calls {target[:80]!r}, which an artifact may not")
            return function
        known = {
            "placeholder": bool(_NAME.fullmatch(target)) and not keyword.iskeyword(target),
            "output": target == "output",
            "call_method": target in METHODS or (self._on_copy and target in WRITING_METHODS),
            "get_attr": target in self._paths["get_attr"],
            "call_module": target in self._paths["call_module"],
        }
        if not known.get(op, False):
            raise ArtifactError(f"the {op[:80]} of {target[:80]!r} is not known")
        return target

    def _constant(self, value: object) -> torch.Tensor | None:
        if not isinstance(value, Node) or value.op != "get_attr":
            return None
        found = attribute(self._root, str(value.target))
        return found if isinstance(found, torch.Tensor) else None

    def _add_meta(self, node: Node, meta: dict[str, Any]) -> None:
        if not meta.keys() <= _META:
            raise ArtifactError(f"its meta data have unknown entries: {sorted(meta)}")
        for key in ("layer", "source", "why"):
            if key in meta:
                node.meta[key] = typed(str, meta[key], key)
        if "shape" in meta:
            node.meta["shape"] = tuple(
                typed(int, s, "size") for s in typed(list, meta["shape"], "shape")
            )
        if "input_dtype" in meta:
            dtype = DTYPES.get(typed(str, meta["input_dtype"], "input_dtype"))
            if dtype is None or node.op != "placeholder":
                raise ArtifactError("its input_dtype is not that of an input")
            node.meta["input_dtype"] = dtype
        if "qparams" in meta:
            node.meta["qparams"] = _qparams(node, meta["qparams"])

    def finished(self) -> GraphModule:
        """The graph module, once all nodes are there."""
        if not self._nodes or self._nodes[-1].op != "output":
            raise ArtifactError("its graph has no output")
        targets = [n.target for n in self._nodes if n.op == "placeholder"]
        if len(set(targets)) != len(targets):
            raise ArtifactError("two of its inputs have one name")
        return GraphModule(self._root, self._graph, class_name="LoadedGraph").eval()


def _qparams(node: Node, value: object) -> QParams:
    """The scale and zero point of ``node``, which must be codes: the runtime relies on it."""
    pair = typed(list, value, "qparams")
    if len(pair) != 2 or type(pair[0]) is not float or type(pair[1]) is not int:
        raise ArtifactError("its qparams are not a scale and a zero point")
    scale, zero_point = pair
    if not (0 < scale < float("inf")) or not 0 <= zero_point <= 255:
        raise ArtifactError(f"its qparams are {pair}, which mean nothing")
    source: object = node
    while isinstance(source, Node) and source.op.startswith("call_") and not is_op(source):
        source = source.args[0] if source.args else None
    if not isinstance(source, Node) or not is_op(source) or not yields_codes(source):
        raise ArtifactError("it has qparams, but does not yield codes")
    return QParams(scale, zero_point)


def _check_arity(op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """How many arguments nodes have that are no calls, or are operators in generated code."""
    if getattr(target, "__module__", None) == "_operator":
        wanted = len(inspect.signature(target).parameters)
        if len(args) != wanted or kwargs:
            raise ArtifactError(f"the operator {target.__name__} takes {wanted} arguments")
    most = {"placeholder": 1, "get_attr": 0, "output": 1}.get(op)
    if most is not None and (len(args) > most or kwargs):
        raise ArtifactError(f"a {op} has at most {most} arguments")
    if (op == "output" and not args) or (op == "call_method" and not args):
        raise ArtifactError(f"a {op} without arguments")


def _writes(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in WRITING_METHODS
    return node.op == "call_function" and WRITING_FUNCTIONS.name(node.target) is not None


def _is_copied(value: object) -> bool:
    """Whether ``value`` is a copy that the graph has made, or a view of one."""
    while isinstance(value, Node) and value.op.startswith("call_"):
        if value.target is torch.clone:
            return True
        value = value.args[0] if value.args else None
    return False


def _check_getattr(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if len(args) != 2 or kwargs or not isinstance(args[0], Node) or args[1] not in ATTRIBUTES:
        raise ArtifactError(f"it reads an attribute it may not: {str(args[1:])[:80]}")


def _rows(manifest: dict[str, Any], key: str, kinds: tuple[type, ...]) -> list[list[Any]]:
    rows = typed(list, manifest[key], key)
    for row in rows:
        if tuple(map(type, typed(list, row, key))) != kinds:
            raise ArtifactError(f"an entry of {key} is not as it should be")
    return rows


def _reports(manifest: dict[str, Any]) -> tuple[Report, ...]:
    return tuple(Report(*row) for row in _rows(manifest, "reports", (str, int, str)))


def _float_nodes(manifest: dict[str, Any]) -> tuple[FloatNode, ...]:
    return tuple(FloatNode(*row) for row in _rows(manifest, "float_nodes", (str, str, str, str)))
