"""Static quantization of one traceable part of a model, by stock FX with x86quant's mapping."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.ao.nn.intrinsic.modules.fused import _FusedModule
from torch.ao.quantization import ObserverBase, QConfigMapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from x86quant.compiled import CompiledModule
from x86quant.compiled.compiler import build
from x86quant.compiled.structure import Structure
from x86quant.dynamic import DynamicMultiheadAttention, Int8Linear
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.lowering.mutation import OnCopy
from x86quant.quantization.batches import Call
from x86quant.quantization.proof import difference
from x86quant.quantization.settings import Settings
from x86quant.quantization.tracing import Traced
from x86quant.quantization.wording import first_line, quiet
from x86quant.stock.observers import ObserverName, WeightObserverName
from x86quant.stock.qconfig import get_backend_config, get_default_qconfig_mapping

#: Scale and zero point by observer.
Chosen: TypeAlias = dict[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Ranges:
    """How ranges are chosen: names of ``x86quant.stock.observers``, and the bits of activations."""

    observer: ObserverName = "mse"
    weight_observer: WeightObserverName = "minmax"
    activation_bits: int = 8

    @staticmethod
    def of(settings: Settings) -> Ranges:
        """Those asked for.

        Raises:
            InvalidInputError: a name or a number is not one of those that there are.
        """
        ranges = Ranges(
            observer="mse" if settings.observer == "auto" else settings.observer,  # type: ignore[arg-type]
            weight_observer="minmax"
            if settings.weight_observer == "auto"
            else settings.weight_observer,  # type: ignore[arg-type]
            activation_bits=settings.activation_bits,
        )
        ranges.mapping()  # wrong names are told before any data is read
        return ranges

    def mapping(self) -> QConfigMapping:
        """The qconfig mapping; x86quant's own layers are left as they are."""
        mapping = get_default_qconfig_mapping(
            activation_bits=self.activation_bits,
            observer=self.observer,
            weight_observer=self.weight_observer,
        )
        ours = (*Int8Linear.__subclasses__(), DynamicMultiheadAttention, OnCopy)
        for kind in (*ours, *_FLOAT_LAYERS):
            mapping.set_object_type(kind, None)
        return mapping


#: They run as torch runs them: stock quantization has no static form of the recurrent ones, and
#: would turn a whole table of embeddings back into floats at each call.
_FLOAT_LAYERS: tuple[Any, ...] = (
    nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.Embedding, nn.EmbeddingBag,
    F.embedding, F.embedding_bag, nn.MultiheadAttention, nn.Bilinear,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One step of a graph that static quantization turns into int8.

    Attributes:
        name: the module's path, or the node's name for a function.
        node: the node in the prepared graph.
        kind: the class or function.
        scope: the path of the module it belongs to.
    """

    name: str
    node: Node
    kind: str
    scope: str


class StaticPart:
    """A traced part: observed, calibrated, and then built as often as one likes.

    Attributes:
        path: where in the model it stands; empty for the whole of it.
        float_module: the traced float part, as equalization and bias correction left it.
        prepared: the same with observers.
        corrections: what bias correction subtracts from biases, by path.
        chosen_before: the ranges that were chosen before the last calls were calibrated.
        rounded: layers with rounded weights, by the node that calls them, as simulations make them.
    """

    def __init__(self, path: str, traced: Traced, example: Call, ranges: Ranges) -> None:
        self.path = path
        self.traced = traced
        self._not_float = _not_float(traced.graph_module, example)
        self.float_module = traced.graph_module
        self._example = example.args
        self._ranges = ranges
        self._built: dict[tuple[Any, ...], CompiledModule] = {}
        self.corrections: dict[str, torch.Tensor] = {}
        self.chosen_before: Chosen = {}
        self.rounded: dict[str, nn.Module] = {}
        self._put_observers()
        if apart := self._apart():
            self._not_float |= apart
            self._put_observers()
        self._check_prepared()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every step that becomes int8, in order."""
        return tuple(self._layers())

    @property
    def steps_between(self) -> set[str]:
        """The names of the layers that are no products: sums, joins and the like."""
        return {layer.name for layer in self.layers if not self._multiplies(layer.node)}

    def inputs(self, call: Call) -> Call | None:
        """The graph's inputs in a call of the part; None if the graph does not hold for it."""
        return self.traced.inputs(call)

    def calibrate(self, call: Call) -> None:
        """Show the observers one batch of the graph's inputs."""
        call(self.prepared)

    def note_ranges(self) -> None:
        """Keep the ranges that follow from the calls so far, to judge them by those to come."""
        with contextlib.suppress(InvalidInputError):  # some observer has seen nothing yet
            self.chosen_before = {
                observer: observer.calculate_qparams()
                for observer in self._modules.values()
                if _is_observer(observer)
            }

    def observer_of(self, node: object) -> ObserverBase | None:
        """The observer whose result ``node`` of the prepared graph is."""
        if not isinstance(node, Node) or node.op != "call_module":
            return None
        module = self._modules[str(node.target)]
        return module if _is_observer(module) else None

    def output_observer(self, node: Node) -> ObserverBase | None:
        """The observer of the result of ``node``."""
        for user in node.users:
            if (observer := self.observer_of(user)) is not None:
                return observer
        return None

    @functools.cached_property
    def float_graph(self) -> Graph:
        """The graph of the prepared part without its observers: the same nodes, in float."""
        graph = Graph()
        graph.output(graph.graph_copy(self.prepared.graph, val_map={}))
        for node in list(graph.nodes):
            if node.op == "call_module" and _is_observer(self._modules[str(node.target)]):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        return graph

    def is_fused(self, node: Node) -> bool:
        """Whether ``node`` calls a layer with an activation fused behind it."""
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        return isinstance(module, _FusedModule)

    def module(self, node: Node) -> nn.Module | None:
        """The layer that ``node`` of the prepared graph calls, the core of a fused one."""
        if node.op != "call_module":
            return None
        return core(self._modules[str(node.target)])

    @property
    def needs_guard(self) -> bool:
        """Whether the graph is not all of the part: not every call, or not the same result."""
        traced = self.traced
        plain = traced.form.is_plain and traced.results.is_plain
        return not (plain and traced.guard.is_trivial)

    def build(
        self,
        float_layers: Collection[str] = (),
        *,
        flat: bool | None = None,
    ) -> CompiledModule:
        """The graph in int8, but for the layers named, which stay in float.

        With ``flat`` it returns a tuple of tensors, for a guard around it; else what the part
        returns.

        Raises:
            UnsupportedError: the converted part cannot be lowered.
        """
        flat = self.needs_guard if flat is None else flat
        key = (frozenset(float_layers), flat)
        if key in self._built:
            return self._built.pop(key)
        if float_layers:
            prepared = self._prepare(self._mapping_without(float_layers))
            self._hand_over_ranges(prepared)
        else:
            prepared = copy.deepcopy(self.prepared)
        for path, correction in self.corrections.items():
            if path not in float_layers:
                _correct(core(prepared.get_submodule(path)), correction)
        if not flat:
            _return(prepared, self.traced.results)
        try:
            with quiet():
                reference = convert_to_reference_fx(prepared, backend_config=get_backend_config())
                compiled = build(reference, self._example)
        except UnsupportedError:
            raise
        except Exception as error:  # stock conversion and lowering meet graphs of all kinds
            raise UnsupportedError(f"it cannot be converted ({first_line(error)})") from error
        _name_float_sources(compiled.graph_module, reference)
        return compiled

    def check_build(self, *, flat: bool) -> None:
        """Build the part as it will be asked for first, to see that it can be.

        Raises:
            UnsupportedError: it cannot.
        """
        self._built[(frozenset(), flat)] = self.build(flat=flat)

    def _check_prepared(self) -> None:
        """That stock fusions have not changed what the graph computes."""
        with torch.no_grad():
            expected = tuple(self.float_module(*self._example))
            actual = Interpreter(self.prepared, graph=self.float_graph).run(*self._example)
        if (reason := difference(expected, tuple(actual))) is not None:
            raise UnsupportedError(f"stock fusion changes it: {reason}")

    def _prepare(self, mapping: QConfigMapping) -> GraphModule:
        try:
            with quiet():
                prepared: GraphModule = prepare_fx(
                    copy.deepcopy(self.float_module),
                    mapping,
                    self._example,
                    prepare_custom_config=PrepareCustomConfig().set_non_traceable_module_classes(
                        [OnCopy]
                    ),
                    backend_config=get_backend_config(),
                )
        except Exception as error:  # stock code meets graphs of all kinds
            raise UnsupportedError(f"it cannot be prepared ({first_line(error)})") from error
        return prepared.eval()

    def _mapping(self) -> QConfigMapping:
        """The qconfig mapping, without what does not compute in float32."""
        mapping = self._ranges.mapping()
        counts: dict[Any, int] = {}
        for node in self.float_module.graph.nodes:
            number = counts.get(node.target, 0)
            counts[node.target] = number + 1
            if node.name in self._not_float:
                _keep_float(mapping, node, number)
        return mapping

    def _put_observers(self) -> None:
        self.prepared = self._prepare(self._mapping())
        self._modules = dict(self.prepared.named_modules(remove_duplicate=False))

    def _apart(self) -> set[str]:
        """The names of steps that no codes link to a step with weights or to a matrix product.

        In int8 they would only round what torch computes before and behind them: the angles of a
        time embedding, say, which reach 1000 and whose sine is taken.
        """
        groups: dict[Node, list[Node]] = {}
        for node in self.prepared.graph.nodes:
            if self.output_observer(node) is None or not self._is_known(node):
                continue
            groups[node] = [node]
            for source in map(self._unobserved, node.all_input_nodes):
                group = groups.get(source, groups[node])
                if group is not groups[node]:
                    group += groups[node]
                    groups.update(dict.fromkeys(groups[node], group))
        linked = {node for node in groups if any(self._multiplies(one) for one in groups[node])}
        if not linked:
            return set()
        return {n.name for n in groups if n not in linked and n.op != "call_method"}

    def _is_known(self, node: Node) -> bool:
        """Whether stock quantization has a form for ``node``; what it has none for is float."""
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        return (node.target if module is None else type(module)) in _known_to_stock()

    def _multiplies(self, node: Node) -> bool:
        """Whether ``node``, or what is computed as one with it, is a product with weights."""
        while True:
            module = self.module(node)
            if is_weighted(module) or node.target in _PRODUCTS:
                return True
            inputs = [x for x in node.all_input_nodes if x.op.startswith("call_")]
            if len(inputs) != 1 or self.observer_of(inputs[0]) is not None:
                return False
            (node,) = inputs

    def _layers(self) -> Iterator[Layer]:
        scopes = {n.name: n.meta.get("scope", "") for n in self.float_module.graph.nodes}
        for node in self.prepared.graph.nodes:
            if node.op not in ("call_module", "call_function"):
                continue
            observer = self.output_observer(node)
            if observer is None or not self._is_known(node):
                continue
            if any(self.observer_of(x) is observer for x in node.all_input_nodes):
                continue  # it only moves codes: pools, reshapes, ...
            module = self.module(node)
            kind = type(module).__name__ if module is not None else _name(node.target)
            name = node.name if module is None else str(node.target)
            yield Layer(name, node, kind, scopes.get(node.name, ""))

    def _mapping_without(self, float_layers: Collection[str]) -> QConfigMapping:
        mapping = self._mapping()
        counts: dict[Any, int] = {}
        in_float = self._in_float(float_layers)
        for node in self.prepared.graph.nodes:
            if node.op == "call_module":
                if node in in_float:
                    mapping.set_module_name(str(node.target), None)
            elif node.op == "call_function":
                # Stock mappings know functions by their number among those of their kind.
                number = counts.get(node.target, 0)
                counts[node.target] = number + 1
                if node in in_float:
                    mapping.set_module_name_object_type_order("", node.target, number, None)
        return mapping

    def _in_float(self, float_layers: Collection[str]) -> set[Node]:
        """The nodes of the layers named, and those that only move what float layers produce."""
        fused = self._with_fused(float_layers)
        int8 = {layer.node for layer in self.layers if layer.name not in float_layers}
        found: set[Node] = set()
        for node in self.prepared.graph.nodes:
            sources = [self._unobserved(x) for x in node.all_input_nodes]
            named = node.name in fused or (node.op == "call_module" and node.target in float_layers)
            moves = node not in int8 and bool(sources) and all(x in found for x in sources)
            if named or moves:
                found.add(node)
        return found

    def _unobserved(self, node: Node) -> Node:
        return node if self.observer_of(node) is None else node.all_input_nodes[0]

    def _with_fused(self, names: Collection[str]) -> set[str]:
        """The functions named, and those that are computed as one with them."""
        found = set()
        for node in self.prepared.graph.nodes:
            while node.op == "call_function" and (node.name in names or node.name in found):
                found.add(node.name)
                before = [x for x in node.all_input_nodes if x.op == "call_function"]
                if len(before) != 1 or self.output_observer(before[0]) is not None:
                    break
                (node,) = before
                found.add(node.name)
        return found

    def _hand_over_ranges(self, prepared: GraphModule) -> None:
        """Give the observers of another prepared form the ranges found in calibration."""
        known = {
            node.args[0].name: self.observer_of(node)
            for node in self.prepared.graph.nodes
            if self.observer_of(node) is not None
        }
        for node in prepared.graph.nodes:
            if node.op == "call_module" and _is_observer(prepared.get_submodule(str(node.target))):
                observer = known[node.args[0].name]
                prepared.add_submodule(str(node.target), copy.deepcopy(observer))  # type: ignore[arg-type]


def _keep_float(mapping: QConfigMapping, node: Node, number: int) -> None:
    """Tell stock quantization to leave ``node`` alone, the ``number``th of its kind."""
    target: Any = node.target
    if node.op == "call_module":
        mapping.set_module_name(target, None)
    elif node.op == "call_function":
        mapping.set_module_name_object_type_order("", target, number, None)
    elif node.op == "call_method":
        mapping.set_object_type(target, None)


def _not_float(gm: GraphModule, example: Call) -> set[str]:
    """The names of nodes that take or give tensors other than of float32, or numbers computed."""
    kinds: dict[Node, Any] = {}
    constants: set[Node] = set()

    class Watch(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            kinds[n] = value.dtype if isinstance(value, torch.Tensor) else type(value)
            return value

    with torch.no_grad():
        Watch(gm).run(*example.args)
    found = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" or (
            node.op.startswith("call_")
            and node.all_input_nodes
            and constants.issuperset(node.all_input_nodes)
        ):
            constants.add(node)
        if not node.op.startswith("call_"):
            continue
        given = [kinds[n] for n in node.all_input_nodes]
        tensors = [k for k in (*given, kinds[node]) if isinstance(k, torch.dtype)]
        computed = any(k in (int, float, bool) for k in given) and not _moves(node)
        if (
            any(k is not torch.float32 for k in tensors)
            or computed
            or _untrained(gm, node)
            or (node.target in _WEIGHTED and not _constant_weight(node))
        ):
            found.add(node.name)
    return found


def is_weighted(module: nn.Module | None) -> bool:
    """Whether ``module`` is a convolution or linear, whose weight becomes int8."""
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


_PRODUCTS_WITH_WEIGHTS = (
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
)  # fmt: skip
_PRODUCTS = (*_PRODUCTS_WITH_WEIGHTS, torch.matmul, torch.bmm)


@functools.cache
def _known_to_stock() -> frozenset[Any]:
    """The classes, functions and methods that stock quantization knows, alone or fused."""
    patterns = [config.pattern for config in get_backend_config().configs]
    return frozenset(one for pattern in patterns for one in pytree.tree_leaves(pattern))


#: Functions with a weight as their second argument, which stock quantization takes for a constant.
_WEIGHTED = (*_PRODUCTS_WITH_WEIGHTS, F.layer_norm, F.instance_norm)


def _constant_weight(node: Node) -> bool:
    inputs = node.all_input_nodes[1:]
    return bool(inputs) and all(n.op == "get_attr" for n in inputs)


def _moves(node: Node) -> bool:
    """Whether the numbers that ``node`` takes are sizes or indices."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name in _MOVING


_MOVING = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "permute",
        "transpose",
        "unsqueeze",
        "squeeze",
        "expand",
        "getitem",
        "chunk",
        "split",
        "narrow",
        "select",
        "repeat",
        "interpolate",
        "unflatten",
        "slice",
        "contiguous",
    ]
)


def _untrained(gm: GraphModule, node: Node) -> bool:
    """Whether ``node`` calls a norm that takes its statistics from the batch."""
    if node.op != "call_module":
        return False
    layer = gm.get_submodule(str(node.target))
    kinds = nn.modules.batchnorm._NormBase
    return isinstance(layer, kinds) and layer.running_mean is None


def _return(gm: GraphModule, results: Structure) -> None:
    """Let ``gm``, which returns a tuple of tensors, return ``results`` made of them."""
    output = next(node for node in gm.graph.nodes if node.op == "output")
    output.args = (results.fill(list(output.args[0])),)


def core(module: nn.Module) -> nn.Module:
    """``module``, or the layer in it if activations are fused behind one."""
    if isinstance(module, _FusedModule):
        first: nn.Module = module[0]
        return first
    return module


def _correct(layer: Any, correction: torch.Tensor) -> None:
    bias = correction.new_zeros(len(correction)) if layer.bias is None else layer.bias.detach()
    layer.bias = nn.Parameter((bias - correction).float(), requires_grad=False)


def _name_float_sources(compiled: GraphModule, reference: GraphModule) -> None:
    """Note on each node of the compiled graph which node of the float graph it stands for."""
    floats = {
        node.name: node.args[0].name
        for node in reference.graph.nodes
        if node.target is torch.quantize_per_tensor
    }
    for node in compiled.graph.nodes:
        source = node.meta.get("source")
        if "qparams" in node.meta and source in floats:
            node.meta["float_source"] = floats[source]


def _is_observer(module: nn.Module) -> bool:
    return isinstance(module, ObserverBase)


def _name(target: object) -> str:
    return str(getattr(target, "__name__", target))
