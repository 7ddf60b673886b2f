"""``load``: the model in a file, with everything in it checked and nothing in it executed."""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.artifacts import container, modules
from x86quant.artifacts.allowed import ATTRIBUTES, FUNCTIONS, METHODS
from x86quant.artifacts.checks import check_op, yields_codes
from x86quant.artifacts.values import decode
from x86quant.compiled import CompiledModule
from x86quant.errors import ArtifactError
from x86quant.lowering import FloatNode
from x86quant.lowering.graph_tools import QParams, attribute, is_op
from x86quant.lowering.passes import Report

_T = TypeVar("_T")

# Names end up in the code that torch.fx generates for a graph: nothing else than names may.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,400}", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9_]{1,400}", re.ASCII)
_MAX_PARTS = 64

_MANIFEST = {
    "x86quant", "torch", "metadata", "reports", "float_nodes", "nodes", "attributes", "modules",
    "orders",
}  # fmt: skip
_NODE = {"name", "op", "target", "args", "kwargs", "meta"}
_META = {"layer", "source", "why", "shape", "qparams", "input_dtype"}
_INPUT_DTYPES = {str(d).removeprefix("torch."): d for d in container.STORABLE}


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An input of a saved model; what is not known is None."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """What an artifact says about itself.

    Attributes:
        x86quant: the version that wrote it.
        torch: the torch it was written with.
        inputs: the model's inputs, as in the example it was made with.
        metadata: what was passed to ``save``.
        reports: what each pass of the lowering did.
        float_nodes: the nodes that run as torch float ops, and why.
        tensor_bytes: the size of all its tensors.
    """

    x86quant: str
    torch: str
    inputs: tuple[Input, ...]
    metadata: dict[str, Any]
    reports: tuple[Report, ...]
    float_nodes: tuple[FloatNode, ...]
    tensor_bytes: int


def load(path: str | os.PathLike[str]) -> CompiledModule:
    """The model in the file ``path``, written by ``save`` on this or any other CPU.

    Nothing in the file is executed: its graph may only call ops from closed lists. Weights are
    packed at the first run, for this CPU, by the rules in force.

    Raises:
        ArtifactError: the file is damaged, of another version, or not what ``save`` writes.
        OSError: the file cannot be read.
    """
    return _opened(Path(path))[1]


def describe(path: str | os.PathLike[str]) -> Description:
    """What the artifact ``path`` says about itself; checked like ``load`` does."""
    description, _ = _opened(Path(path))
    return description


def _opened(path: Path) -> tuple[Description, CompiledModule]:
    try:
        return from_bytes(container.read_bytes(path))
    except ArtifactError as error:
        raise ArtifactError(f"{path} cannot be loaded: {error}") from error


def from_bytes(data: bytes) -> tuple[Description, CompiledModule]:
    """The content of a file as what it says about itself, and the model."""
    manifest, tensors = container.unpack(data)
    model = _built(manifest, tensors)
    return _description(manifest, tensors, model), model


def _built(manifest: dict[str, Any], tensors: dict[str, torch.Tensor]) -> CompiledModule:
    _check_keys("the manifest", manifest, _MANIFEST)
    reader = _Reader(_restored(manifest["orders"], tensors))
    for path, content in _typed(dict, manifest["attributes"], "attributes").items():
        reader.add_attribute(path, content)
    for path, content in _typed(dict, manifest["modules"], "modules").items():
        reader.add_module(path, content)
    for number, content in enumerate(_typed(list, manifest["nodes"], "nodes")):
        try:
            reader.add_node(content)
        except ArtifactError as error:
            raise ArtifactError(f"node {number} is not valid: {error}") from error
    return CompiledModule(reader.finished(), _reports(manifest), _float_nodes(manifest))


def _restored(orders: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` in the memory order they had."""
    restored = dict(tensors)
    for name, order in _typed(dict, orders, "orders").items():
        if name not in tensors or not isinstance(order, list):
            raise ArtifactError(f"the memory order of {name[:80]!r} is of no tensor")
        dims = tensors[name].dim()
        if any(type(d) is not int for d in order) or sorted(order) != list(range(dims)):
            raise ArtifactError(f"the memory order of {name!r} is no order of {dims} dimensions")
        inverse = [order.index(d) for d in range(dims)]
        restored[name] = tensors[name].permute(inverse)
    return restored


class _Reader:
    """Builds one graph module."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._unused = set(tensors)
        self._root = nn.Module()
        self._paths: dict[str, set[str]] = {"get_attr": set(), "call_module": set()}
        self._graph = Graph()
        self._nodes: list[Node] = []

    # --- constants and layers ---

    def add_attribute(self, path: str, content: object) -> None:
        """Give the root the constant at ``path``."""
        found = _typed(dict, content, f"attribute {path[:80]!r}")
        home, name = self._place(path, "get_attr")
        if found.keys() == {"tensor"}:
            home.register_buffer(name, self._tensor(found["tensor"]))
        elif found.keys() == {"value"}:
            setattr(home, name, decode(found["value"], ()))
        else:
            raise ArtifactError(f"attribute {path!r} is neither a tensor nor a value")

    def add_module(self, path: str, content: object) -> None:
        """Give the root the layer at ``path``."""
        found = _typed(dict, content, f"layer {path[:80]!r}")
        _check_keys(f"layer {path[:80]!r}", found, {"class", "arguments", "tensors"})
        names = _typed(dict, found["tensors"], "tensors of a layer")
        state = {key: self._tensor(name) for key, name in names.items()}
        arguments = _typed(dict, found["arguments"], "arguments of a layer")
        home, name = self._place(path, "call_module")
        home.add_module(name, modules.build(_typed(str, found["class"], "class"), arguments, state))

    def _tensor(self, name: object) -> torch.Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise ArtifactError(f"the tensor {str(name)[:80]!r} is not in the file")
        self._unused.discard(name)
        return self._tensors[name]

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
        found = _typed(dict, content, "it")
        _check_keys("it", found, _NODE)
        if self._nodes and self._nodes[-1].op == "output":
            raise ArtifactError("it comes after the output")
        name, op = _typed(str, found["name"], "name"), _typed(str, found["op"], "op")
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            raise ArtifactError(f"{name[:80]!r} is not a name")
        target = self._target(op, _typed(str, found["target"], "target"))
        args = tuple(decode(a, self._nodes) for a in _typed(list, found["args"], "args"))
        kwargs = {
            key: decode(a, self._nodes)
            for key, a in _typed(dict, found["kwargs"], "kwargs").items()
        }
        if bad := [k for k in kwargs if not _NAME.fullmatch(k) or keyword.iskeyword(k)]:
            raise ArtifactError(f"{bad[0][:80]!r} is not the name of an argument")
        _check_arity(op, target, args, kwargs)
        node = self._graph.create_node(op, target, args, kwargs, name=name)
        if node.name != name:
            raise ArtifactError(f"the name {name!r} is taken")
        if target is getattr:
            _check_getattr(args, kwargs)
        if is_op(node):
            check_op(node, self._constant)
        self._add_meta(node, _typed(dict, found["meta"], "meta"))
        self._nodes.append(node)

    def _target(self, op: str, target: str) -> Any:
        if op == "call_function":
            function = FUNCTIONS.find(target)
            if function is None:
                raise ArtifactError(f"it calls {target[:80]!r}, which an artifact may not")
            return function
        known = {
            "placeholder": bool(_NAME.fullmatch(target)) and not keyword.iskeyword(target),
            "output": target == "output",
            "call_method": target in METHODS,
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
                node.meta[key] = _typed(str, meta[key], key)
        if "shape" in meta:
            node.meta["shape"] = tuple(
                _typed(int, s, "size") for s in _typed(list, meta["shape"], "shape")
            )
        if "input_dtype" in meta:
            dtype = _INPUT_DTYPES.get(_typed(str, meta["input_dtype"], "input_dtype"))
            if dtype is None or node.op != "placeholder":
                raise ArtifactError("its input_dtype is not that of an input")
            node.meta["input_dtype"] = dtype
        if "qparams" in meta:
            node.meta["qparams"] = _qparams(node, meta["qparams"])

    def finished(self) -> GraphModule:
        """The graph module, once all nodes are there."""
        if not self._nodes or self._nodes[-1].op != "output":
            raise ArtifactError("its graph has no output")
        if self._unused:
            raise ArtifactError(f"the tensor {min(self._unused)[:80]!r} belongs to nothing")
        targets = [n.target for n in self._nodes if n.op == "placeholder"]
        if len(set(targets)) != len(targets):
            raise ArtifactError("two of its inputs have one name")
        return GraphModule(self._root, self._graph, class_name="LoadedGraph").eval()


def _qparams(node: Node, value: object) -> QParams:
    """The scale and zero point of ``node``, which must be codes: the runtime relies on it."""
    pair = _typed(list, value, "qparams")
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


def _check_getattr(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if len(args) != 2 or kwargs or not isinstance(args[0], Node) or args[1] not in ATTRIBUTES:
        raise ArtifactError(f"it reads an attribute it may not: {str(args[1:])[:80]}")


# --- the rest of the manifest ----------------------------------------------------------------


def _check_keys(what: str, found: Mapping[str, Any], expected: set[str]) -> None:
    if found.keys() != expected:
        odd = ", ".join(sorted(found.keys() ^ expected))
        raise ArtifactError(f"{what} has missing or unknown entries: {odd[:200]}")


def _typed(kind: type[_T], value: object, what: str) -> _T:
    """``value``, which must be of ``kind``."""
    if type(value) is not kind:
        raise ArtifactError(f"{what} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def _rows(manifest: dict[str, Any], key: str, kinds: tuple[type, ...]) -> list[list[Any]]:
    rows = _typed(list, manifest[key], key)
    for row in rows:
        if tuple(map(type, _typed(list, row, key))) != kinds:
            raise ArtifactError(f"an entry of {key} is not as it should be")
    return rows


def _reports(manifest: dict[str, Any]) -> tuple[Report, ...]:
    return tuple(Report(*row) for row in _rows(manifest, "reports", (str, int, str)))


def _float_nodes(manifest: dict[str, Any]) -> tuple[FloatNode, ...]:
    return tuple(FloatNode(*row) for row in _rows(manifest, "float_nodes", (str, str, str, str)))


def _description(
    manifest: dict[str, Any], tensors: dict[str, torch.Tensor], model: CompiledModule
) -> Description:
    inputs = tuple(
        Input(
            str(node.target),
            str(node.meta["input_dtype"]) if "input_dtype" in node.meta else None,
            node.meta.get("shape"),
        )
        for node in model.graph_module.graph.nodes
        if node.op == "placeholder"
    )
    return Description(
        _typed(str, manifest["x86quant"], "x86quant"),
        _typed(str, manifest["torch"], "torch"),
        inputs,
        _typed(dict, manifest["metadata"], "metadata"),
        model.reports,
        model.float_nodes,
        sum(t.numel() * t.element_size() for t in tensors.values()),
    )
