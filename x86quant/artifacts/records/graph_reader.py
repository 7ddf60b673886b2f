"""A graph out of plain data, everything in it checked and nothing of it executed."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.artifacts.file.stored_tensors import TensorReader
from x86quant.artifacts.file.values import check_keys, decode, typed
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
from x86quant.lowering.graph_tools import QParams, attribute, is_op
from x86quant.lowering.mutation import OnCopy
from x86quant.lowering.op_spec import check_op, yields_codes
from x86quant.lowering.passes import Report

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
