"""From an ONNX graph to a graph of torch.fx: node by node, constants computed at once."""

from __future__ import annotations

import collections
import keyword
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantError, first_line
from x86quant.onnx_models import operators
from x86quant.onnx_models.element_types import UNSIGNED, onnx_type, torch_dtype
from x86quant.onnx_models.node_view import NodeView, view
from x86quant.onnx_models.operator_table import OPERATORS, Operator
from x86quant.onnx_models.operators.elementwise_ops import SIGNED_ONLY
from x86quant.onnx_models.operators.rearranging import of_sizes, tensor_of_numbers
from x86quant.onnx_models.reading import OnnxFile
from x86quant.onnx_models.size_values import Extents, compared, size_arithmetic
from x86quant.onnx_models.value_types import TypesOfValues, ValueType

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

assert operators.__all__  # importing them fills the table

#: Constants that would be larger than this are not computed while a file is read.
_LARGEST_CONSTANT = 2**31
#: Operators whose inputs may change places.
_COMMUTATIVE = frozenset(["Add", "Mul", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal"])

#: Makes a node in a way of its own: returns its results, or None to leave it to the table.
Maker = Callable[["GraphBuilder", NodeView], Sequence[Any] | None]
MAKERS: dict[tuple[str, str], list[Maker]] = collections.defaultdict(list)


def maker(*names: str, domain: str = "") -> Callable[[Maker], Maker]:
    """Declare that the decorated function may make nodes of the operators ``names``."""

    def declared(function: Maker) -> Maker:
        for name in names:
            MAKERS[domain, name].append(function)
        return function

    return declared


class GraphBuilder:
    """Builds one graph.

    Attributes:
        file: that is read.
        root: where layers and constants are put.
        graph: that is built.
        types: of values, as far as they are known.
        keeps_rounding: whether activations are rounded as the file says.
        unrounded: by node of codes, what was rounded to them, their scale and zero point.
    """

    def __init__(
        self, file: OnnxFile, opsets: Mapping[str, int], *, keeps_rounding: bool = True
    ) -> None:
        self.file = file
        self.opsets = opsets
        self.root = nn.Module()
        self.graph = Graph()
        self.types = TypesOfValues(opsets, file.model.ir_version)
        self.keeps_rounding = keeps_rounding
        self.unrounded: dict[Node, tuple[Node, torch.Tensor, torch.Tensor | None]] = {}
        self.known: dict[str, Any] = {"": None}
        self.uses: collections.Counter[str] = collections.Counter()
        self._attributes: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._constants: dict[int, tuple[torch.Tensor, Node]] = {}
        self._sizes: dict[tuple[Node, int], Node] = {}

    # ---- whole graphs

    def inputs(self, graph: GraphProto) -> list[str]:
        """Make a placeholder for each input of the file; returns their names there."""
        constants = {one.name for one in graph.initializer}
        names = []
        for one in graph.input:
            if one.name in constants:
                continue
            names.append(one.name)
            self.types.declare(one)
            known = self.types.of(one.name)
            if one.type.WhichOneof("value") not in ("tensor_type", "sequence_type"):
                raise UnsupportedError(
                    f"{self.file.name}: the input {one.name!r} is neither a tensor nor a sequence"
                )
            if known is not None:
                torch_dtype(known.elements, f"{self.file.name}: the input {one.name!r}")
            node = self.graph.placeholder(self.free_name(one.name))
            sizes = None if known is None else known.sizes
            if sizes is not None:
                node = self.call(of_sizes, node, one.name, tuple(sizes))
            self.known[one.name] = node
        return names

    def run(self, graph: GraphProto) -> list[Any]:
        """Make everything in ``graph``; returns the values of its outputs."""
        if graph.sparse_initializer:
            raise UnsupportedError(f"{self.file.name}: sparse constants are not read")
        for proto in graph.initializer:
            self.bind(proto.name, self.file.tensor(proto))
        for node in graph.node:
            self.node(node)
        return [self.value(one.name, "the graph's outputs") for one in graph.output]

    def node(self, proto: NodeProto, opsets: Mapping[str, int] | None = None) -> None:
        """Make one node.

        Raises:
            UnsupportedError: it cannot be read.
            InvalidInputError: it is no valid node, or fails on what the file gives it.
        """
        label = proto.op_type
        try:
            seen = view(proto, self.file, opsets or self.opsets, self._attributes)
            label = seen.label
            for name in seen.inputs:
                self.value(name, label)
            self._bind_results(seen, self._made(seen))
        except X86QuantError as error:
            if str(error).startswith(("the operator", self.file.name)):
                raise
            raise type(error)(f"the operator {label}: {error}") from error
        except Exception as error:  # of torch or onnx, on constants or attributes that do not fit
            raise InvalidInputError(
                f"the operator {label} fails on what the file gives it: {first_line(error)}"
            ) from error

    def _bind_results(self, seen: NodeView, results: Sequence[Any]) -> None:
        self.types.infer(seen, {n: self.known.get(n) for n in seen.inputs})
        for name, value in zip(seen.outputs, results, strict=False):
            if name:
                self.bind(name, value)
        for name in seen.outputs[len(results) :]:
            if name:
                raise seen.refusal(f"its result {name!r} is not computed")

    def bind(self, name: str, value: Any) -> None:
        """Let ``name`` be ``value``."""
        if isinstance(value, Extents):
            constant = value.constant
            value = value if constant is None else constant
            if isinstance(value, Extents):
                self.types.set(name, ValueType(7, [] if value.scalar else [len(value.items)]))
        if isinstance(value, torch.Tensor):
            self.types.set(name, ValueType(onnx_type(value.dtype), list(value.shape)))
        self.known[name] = value

    def value(self, name: str, reader: str) -> Any:
        """What ``name`` stands for.

        Raises:
            InvalidInputError: nothing before its reader makes it.
        """
        if name not in self.known:
            raise InvalidInputError(
                f"{self.file.name}: {reader} reads {name!r}, which neither an input nor a node "
                "before it makes: the graph has a cycle, is not sorted, or lacks something"
            )
        return self.known[name]

    def finish(self, values: Sequence[Any], *, always_tuple: bool = False) -> GraphModule:
        """The module that returns ``values``."""
        results = tuple(self.node_of(value) for value in values)
        self.graph.output(results if always_tuple or len(results) != 1 else results[0])
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        return GraphModule(self.root, self.graph, class_name="OnnxModel").eval()

    # ---- nodes

    def _made(self, seen: NodeView) -> Sequence[Any]:
        inputs = [self.known[name] for name in seen.inputs]
        sizes = size_arithmetic(seen.op_type, inputs, dict(seen.attributes), self._number)
        if sizes is not None:
            return [sizes]
        if seen.op_type == "Equal" and (found := compared(inputs)) is not None:
            return [found]
        key = (seen.domain, seen.op_type)
        for one in MAKERS.get(key, ()):
            made = one(self, seen)
            if made is not None:
                return made
        entry = OPERATORS.get(key)
        reason = "it is unknown" if entry is None else _lacks(entry, seen)
        kinds = {known.elements for n in seen.inputs if (known := self.types.of(n)) is not None}
        if reason is None and seen.op_type in SIGNED_ONLY and kinds & UNSIGNED:
            raise seen.refusal("of values in more than 8 bits without a sign")
        if entry is not None and reason is None:
            return self._by_table(entry, seen, inputs)
        body = _body(seen, self)
        if body is not None:
            return self._by_body(body, seen, inputs)
        assert reason is not None
        raise seen.refusal(reason)

    def _number(self, function: Any, args: tuple[Any, ...]) -> Node:
        return self.graph.call_function(function, args)

    def _by_table(self, entry: Operator, seen: NodeView, inputs: list[Any]) -> Sequence[Any]:
        if seen.op_type in _COMMUTATIVE and isinstance(inputs[0], torch.Tensor):
            inputs = inputs[::-1]
        args = [self._argument(entry, n, value, seen, inputs) for n, value in enumerate(inputs)]
        kwargs = {name: seen.attributes[name] for name in entry.keywords & {*seen.attributes}}
        special = {
            "outputs": len(seen.outputs),
            "version": seen.version,
            "op_type": seen.op_type,
        }
        kwargs |= {name: special[name] for name in entry.keywords & {*special}}
        if "dtype" in entry.keywords and "dtype" not in kwargs and seen.op_type == "Range":
            known = self.types.of(seen.inputs[0])
            if known is None:
                raise seen.refusal("the type of its bounds is not known")
            kwargs["dtype"] = torch_dtype(known.elements, seen.label)
        if not any(True for _ in _nodes((args, kwargs))):
            return self._computed(entry, seen, args, kwargs)
        made = self.call(entry.function, *args, **kwargs)
        if not entry.returns_tuple:
            return [made]
        return self.several(made, seen.outputs)

    def several(self, made: Node, outputs: Sequence[str]) -> list[Node | None]:
        """The elements of a tuple that have names."""
        return [
            self.call(operator.getitem, made, n) if name else None for n, name in enumerate(outputs)
        ]

    def _argument(
        self, entry: Operator, place: int, value: Any, seen: NodeView, inputs: list[Any]
    ) -> Any:
        if isinstance(value, Extents):
            if place in entry.numbers:
                return list(value.items)
            if place in entry.scalars and len(value.items) == 1:
                return value.items[0]
            return self.node_of(value)
        if not isinstance(value, torch.Tensor):
            return value
        if place in entry.numbers:
            return value.reshape(-1).tolist()
        if place in entry.scalars and value.numel() == 1 and not value.is_complex():
            if seen.schema is None or value.dim() == 0 or not _broadcasts(seen):
                return value.item()
            first = self.types.of(seen.inputs[1 - place])
            if inputs[0] is self.known[seen.inputs[0]]:
                first = self.types.of(seen.inputs[0])
            if first is not None and first.sizes is not None and len(first.sizes) >= value.dim():
                return value.item()
        return value

    def _computed(
        self, entry: Operator, seen: NodeView, args: list[Any], kwargs: dict[str, Any]
    ) -> Sequence[Any]:
        """The results of a node of constants."""
        self.types.infer(seen, {n: self.known.get(n) for n in seen.inputs})
        for name in seen.outputs:
            known = self.types.of(name)
            if known is not None and known.bytes > _LARGEST_CONSTANT:
                raise seen.refusal(f"its result, a constant, is of sizes {known.sizes}")
        with torch.no_grad():
            found = entry.function(*args, **kwargs)
        return found if entry.returns_tuple else [found]

    def _by_body(self, body: Any, seen: NodeView, inputs: list[Any]) -> Sequence[Any]:
        """The operator spelled in others, as ONNX defines it."""
        outside, around, types = self.known, self._attributes, self.types
        given = dict(zip(body.input, inputs, strict=False))
        self.known = {"": None} | {name: given.get(name) for name in body.input}
        self._attributes = seen.protos()
        self.types = TypesOfValues(self.opsets, self.file.model.ir_version)
        for name, source in zip(body.input, seen.inputs, strict=False):
            if (known := types.of(source)) is not None:
                self.types.set(name, known)
        opsets = dict(self.opsets)
        opsets |= {"" if o.domain == "ai.onnx" else o.domain: o.version for o in body.opset_import}
        try:
            for node in body.node:
                self.node(node, opsets)
            wanted = [*seen.outputs, *[""] * (len(body.output) - len(seen.outputs))]
            pairs = zip(body.output, wanted, strict=True)
            return [self.value(name, seen.label) if one else None for name, one in pairs]
        finally:
            self.known, self._attributes, self.types = outside, around, types

    # ---- what makers use

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Node:
        """A node that calls ``function``."""
        args, kwargs = self._as_nodes(args), self._as_nodes(kwargs)
        return self.graph.call_function(function, args, kwargs)

    def method(self, name: str, *args: Any) -> Node:
        """A node that calls a method."""
        return self.graph.call_method(name, self._as_nodes(args))

    def layer(self, module: nn.Module, seen: NodeView, *args: Any, weight: str = "") -> Node:
        """A node that calls ``module``, which is put where its weight's name says."""
        path = weight.removesuffix(".weight") if weight.endswith(".weight") else ""
        if not path or not self._is_free(path):
            path = self.free_name(seen.proto.name or seen.outputs[0])
        parent = self.root
        *around, name = path.split(".")
        for one in around:
            if not hasattr(parent, one):
                parent.add_module(one, nn.Module())
            parent = getattr(parent, one)
        parent.add_module(name, module.eval())
        return self.graph.call_module(path, self._as_nodes(args))

    def layer_of(self, value: Any) -> nn.Module | None:
        """The layer whose result ``value`` is."""
        if not isinstance(value, Node) or value.op != "call_module":
            return None
        return self.root.get_submodule(str(value.target))

    def _is_free(self, path: str) -> bool:
        *around, name = path.split(".")
        if not all(re.fullmatch(r"\w+", part) for part in (*around, name)):
            return False
        found: Any = self.root
        for part in around:
            found = getattr(found, part, None)
            if found is None:
                return True
            if type(found) is not nn.Module:
                return False
        return not hasattr(found, name)

    def node_of(self, value: Any) -> Any:
        """``value`` as a node: constants are buffers."""
        if isinstance(value, torch.Tensor):
            kept = self._constants.get(id(value))
            if kept is None:
                name = self.free_name(next((n for n, v in self.known.items() if v is value), "c"))
                self.root.register_buffer(name, value)
                with self.graph.inserting_before(_first_after_inputs(self.graph)):
                    kept = (value, self.graph.get_attr(name))
                self._constants[id(value)] = kept
            return kept[1]
        if isinstance(value, Extents):
            return self.graph.call_function(tensor_of_numbers, (list(value.items), value.scalar))
        if isinstance(value, tuple | list):
            return type(value)(self.node_of(one) for one in value)
        if hasattr(value, "SerializeToString"):  # torch.fx would write its text into code
            raise InvalidInputError(
                f"an attribute is a {type(value).__name__}, not a number or text"
            )
        return value

    def size(self, node: Node, dim: int) -> Node:
        """The node of one size."""
        if (node, dim) not in self._sizes:
            self._sizes[node, dim] = self.graph.call_method("size", (node, dim))
        return self._sizes[node, dim]

    def free_name(self, wanted: str) -> str:
        """A name like ``wanted`` that nothing has."""
        name = re.sub(r"\W+", "_", wanted).strip("_") or "value"
        name = f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name
        base, number = name, 1
        while name in self._taken or hasattr(self.root, name):
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    def rank(self, name: str) -> int | None:
        """How many dimensions the value ``name`` has."""
        known = self.types.of(name)
        return None if known is None or known.sizes is None else len(known.sizes)

    def _as_nodes(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._as_nodes(one) for key, one in value.items()}
        return self.node_of(value)


def _first_after_inputs(graph: Graph) -> Node:
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr"):
            found: Node = node
            return found
    return graph._root


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _nodes(one)
    elif isinstance(value, dict):
        yield from _nodes(list(value.values()))


def _broadcasts(seen: NodeView) -> bool:
    """Whether a scalar of some dimensions could give the result more of them."""
    return len(seen.inputs) == 2 and seen.op_type not in ("TopK", "CumSum", "CumProd", "Trilu")


def _lacks(entry: Operator, seen: NodeView) -> str | None:
    """What the table's function cannot do that the node asks for."""
    if seen.version < entry.oldest and seen.schema is not None:
        return f"versions from {entry.oldest} on are known"
    for name in sorted(seen.given - entry.keywords):
        default = None if seen.schema is None else seen.schema.attributes.get(name)
        value = seen.attributes[name]
        if default is not None and default.default_value.type:
            from onnx import helper

            usual = helper.get_attribute_value(default.default_value)
            usual = usual.decode() if isinstance(usual, bytes) else usual
            if value == usual:
                continue
        return f"its attribute {name} = {value!r} is not known"
    return entry.lacks(seen.attributes, seen.inputs, seen.outputs)


def _body(seen: NodeView, builder: GraphBuilder) -> Any:
    """The operator's definition by others, as a ``FunctionProto``."""
    from onnx import FunctionProto

    schema: Any = seen.schema  # some of whose attributes have no types
    if schema is None:
        return None
    asked = builder.opsets.get(seen.domain, 1)
    data: bytes | None = None
    if schema.has_context_dependent_function:
        types = [builder.types.proto(name) for name in seen.inputs if name]
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= asked]
        if all(types) and versions:
            data = schema.get_context_dependent_function_with_opset_version(
                max(versions), seen.proto.SerializeToString(),
                [one.SerializeToString() for one in types if one is not None],
            )  # fmt: skip
    elif schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= asked]
        if versions:
            data = schema.get_function_with_opset_version(max(versions))
    if not data:
        return None
    found = FunctionProto()
    found.ParseFromString(data)
    return found
