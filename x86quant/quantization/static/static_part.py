"""Static quantization of one traceable part of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from x86quant.calling.call import Call
from x86quant.calling.differences import difference
from x86quant.calling.wording import quiet
from x86quant.capture.traced_graph import Traced
from x86quant.compiled import CompiledModule
from x86quant.compiled.compiler import build
from x86quant.errors import InvalidInputError, UnsupportedError, first_line
from x86quant.forms.call_form import Structure
from x86quant.lowering.graph_tools import is_op, leads_only
from x86quant.lowering.rounded import RoundedLayer, rounded
from x86quant.lowering.views import is_view
from x86quant.observing.activations import ACTIVATION_OBSERVERS, ObserverName
from x86quant.observing.observer import RangeObserver, named
from x86quant.observing.weights import (
    CHANNEL_OBSERVERS,
    ChannelRangesObserver,
    WeightObserverName,
)
from x86quant.quantization.settings import Settings
from x86quant.quantization.static.conversion import (
    Products,
    converted,
    rounded_layer,
    rounded_products,
    weight_observer,
)
from x86quant.quantization.static.float_steps import float_steps
from x86quant.quantization.static.int8_forms import (
    JOINS,
    PRODUCTS,
    kind_of,
)
from x86quant.quantization.static.observation import Observation, core, is_observer, observed
from x86quant.quantization.static.savable import check_savable
from x86quant.quantization.tracing.recurrent_layers import LAYERS, is_recurrent_layer, states_of

#: Scale and zero point by observer.
Chosen: TypeAlias = dict[Any, Any]
#: What a layer with int8 weights is: a convolution or linear, or a recurrent one.
Rounded: TypeAlias = RoundedLayer | Products


@dataclasses.dataclass(frozen=True, slots=True)
class Ranges:
    """How ranges are chosen: names of observers, and the bits of activations."""

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
        ranges.activation()  # wrong names are told before any data is read
        ranges.weight_kind()
        return ranges

    def activation(self) -> RangeObserver:
        """An observer of activations."""
        if self.activation_bits not in (7, 8):
            raise InvalidInputError(f"activation_bits must be 7 or 8, not {self.activation_bits!r}")
        codes = {"quant_min": 0, "quant_max": 2**self.activation_bits - 1}
        if self.observer == "histogram":
            histogram: RangeObserver = _stock_histogram(codes)
            return histogram
        found: RangeObserver = named(ACTIVATION_OBSERVERS, "observer", self.observer)(**codes)
        return found

    def weight_kind(self) -> type[ChannelRangesObserver]:
        """The class of observers of weights."""
        found: type[ChannelRangesObserver] = named(
            CHANNEL_OBSERVERS, "weight_observer", self.weight_observer
        )
        return found


def _stock_histogram(codes: dict[str, int]) -> Any:
    """The one observer that is stock PyTorch's own."""
    try:
        from x86quant.stock.observers import OBSERVERS
    except ImportError as error:
        raise InvalidInputError(
            'observer="histogram" is stock PyTorch\'s, and this torch has no torch.ao any more; '
            'take "mse", the default, or "percentile"'
        ) from error
    return OBSERVERS["histogram"](**codes)


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
        corrections: what bias correction subtracts from biases, by path, with all layers in int8.
        corrections_alone: the same where some are in float, whose errors no other makes up for.
        chosen_before: the ranges that were chosen before the last calls were calibrated.
        in_float: the names of the steps that have no codes.
        ranges: how its ranges are chosen.
        attributes: modules and tensors of the prepared part that simulations have met, by path.
        native_recurrent: recurrent layers in int8 that they made, by node: the weights, the ranges
            and states that were asked for, and what computes them.
    """

    def __init__(
        self,
        path: str,
        traced: Traced,
        example: Call,
        ranges: Ranges,
        others: Sequence[Call] = (),
        small: Call | None = None,
        *,
        in_float: Collection[str] | None = None,
    ) -> None:
        """Put observers into a graph, which is compared with itself without them on ``small``.

        Its steps ``in_float`` are found by a run on ``example`` if they are not known.
        """
        self.path = path
        self._others = others
        self.traced = traced
        if in_float is None:
            self._not_float, expected = float_steps(traced.graph_module, example)
        else:
            self._not_float, expected = set(in_float), ()
        self.in_float = frozenset(self._not_float)
        self.float_module = traced.graph_module
        self._example = example.args
        self.ranges = ranges
        self._built: dict[tuple[Any, ...], CompiledModule] = {}
        self.corrections: dict[str, torch.Tensor] = {}
        self.corrections_alone: dict[str, torch.Tensor] | None = None
        self.chosen_before: Chosen = {}
        self._rounded: dict[nn.Module, Rounded] = {}
        self.attributes: dict[str, Any] = {}
        self.native_recurrent: dict[str, list[tuple[Products, Any, CompiledModule]]] = {}
        self._tail: set[str] = set()
        self._put_observers()
        if apart := self._apart():
            self._not_float |= apart
            self._put_observers()
        self._tail = self._behind_products()
        if self._tail:
            self._not_float |= self._tail
            self._put_observers()
        if small is not None or in_float is not None:
            small = small or example
            with torch.no_grad():
                expected = Interpreter(self.float_module).run(*small.args)
        self._check_prepared(small or example, expected)

    @functools.cached_property
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

    def corrections_with(self, float_layers: Collection[str]) -> dict[str, torch.Tensor]:
        """What is subtracted from biases with the layers named in float."""
        if float_layers and self.corrections_alone is not None:
            return self.corrections_alone
        return self.corrections

    def calibrate(self, call: Call) -> None:
        """Show the observers one batch of the graph's inputs."""
        call(self.prepared)

    def note_ranges(self) -> None:
        """Keep the ranges that follow from the calls so far, to judge them by those to come."""
        with contextlib.suppress(InvalidInputError):  # some observer has seen nothing yet
            self.chosen_before = {
                observer: observer.calculate_qparams()
                for observer in self._modules.values()
                if is_observer(observer)
            }

    def observer_of(self, node: object) -> Any:
        """The observer whose result ``node`` of the prepared graph is."""
        if not isinstance(node, Node) or node.op != "call_module":
            return None
        module = self._modules[str(node.target)]
        return module if is_observer(module) else None

    def output_observer(self, node: Node) -> Any:
        """The observer of the result of ``node``, or of the states of a recurrent layer."""
        for user in states_of(node, self.module(node)).users:
            if (observer := self.observer_of(user)) is not None:
                return observer
        return None

    def gives_floats(self, node: Node) -> bool:
        """Whether ``node`` is a product of rows whose result leaves the part, and is not rounded.

        Those are the ones that the pass ``keep_float_results`` finds in the graph that is built.
        """
        return self._may_give_floats(node) and leads_only(node, self._leads_out)

    def _may_give_floats(self, node: Node) -> bool:
        """Whether ``node`` is a product of rows, which are windows in a convolution."""
        module: Any = self.module(node)
        if kind_of(node, module) in (nn.Linear, torch.nn.functional.linear):
            return True
        return type(module) in _PLAIN_CONVOLUTIONS and bool(module.groups == 1)

    def _leads_out(self, node: Node) -> bool | None:
        """Whether ``node`` is a result; None of an observer, a view or a step in float before."""
        if node.op == "output":
            return True
        passes = self.observer_of(node) is not None or is_view(node) or node.name in self._tail
        return None if passes else False

    @functools.cached_property
    def float_graph(self) -> Graph:
        """The graph of the prepared part without its observers: the same nodes, in float."""
        graph = Graph()
        graph.output(graph.graph_copy(self.prepared.graph, val_map={}))
        for node in list(graph.nodes):
            if node.op == "call_module" and is_observer(self._modules[str(node.target)]):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        return graph

    @functools.cached_property
    def interpreter(self) -> Interpreter:
        """Runs the prepared part without its observers."""
        return Interpreter(self.prepared, graph=self.float_graph)

    @functools.cached_property
    def nodes(self) -> dict[str, Node]:
        """The nodes of the prepared graph, by name."""
        return {node.name: node for node in self.prepared.graph.nodes}

    def module(self, node: Node) -> nn.Module | None:
        """The layer that ``node`` of the prepared graph calls, the core of a fused one."""
        if node.op != "call_module":
            return None
        return core(self._modules[str(node.target)])

    def rounded_layer(self, node: Node, layer: nn.Module) -> RoundedLayer:
        """The convolution or linear ``layer``, which ``node`` calls, with an int8 weight.

        It is made once: simulations and every build of the part share it.
        """
        if layer not in self._rounded:
            self._rounded[layer] = rounded_layer(node, layer, self.weight_observer)
        return self._rounded[layer]  # type: ignore[return-value]

    def rounded_products(self, node: Node, layer: nn.Module) -> Products:
        """The int8 weights of the recurrent ``layer``, which ``node`` calls, made once as well."""
        if layer not in self._rounded:
            self._rounded[layer] = rounded_products(node, layer, self.weight_observer)
        return self._rounded[layer]  # type: ignore[return-value]

    def replace_weights(self, layers: Mapping[nn.Module, Rounded]) -> dict[nn.Module, Rounded]:
        """Give layers other int8 weights; returns those that they had."""
        before = {layer: self._rounded[layer] for layer in layers}
        self._rounded.update(layers)
        return before

    def weight_observer(self, node: Node, layer: nn.Module | None) -> ChannelRangesObserver:
        """The observer for the weight of ``node``, which calls ``layer`` or is a function."""
        return weight_observer(self.ranges.weight_kind(), node, layer)

    @property
    def needs_guard(self) -> bool:
        """Whether the graph is not all of the part: not every call, or not the same result."""
        traced = self.traced
        plain = traced.form.is_plain and traced.results.is_plain
        return traced.is_partial or not (plain and traced.guard.is_trivial)

    def build(
        self,
        float_layers: Collection[str] = (),
        *,
        flat: bool | None = None,
    ) -> CompiledModule:
        """The graph in int8, except for the layers named, which stay in float.

        With ``flat`` it returns a tuple of tensors, for a guard around it; else what the part
        returns.

        Raises:
            UnsupportedError: the converted part cannot be lowered.
        """
        flat = self.needs_guard if flat is None else flat
        key = (frozenset(float_layers), flat)
        if key in self._built:
            return self._built.pop(key)
        observation = self._observation
        if float_layers:
            in_float = self._not_float | {node.name for node in self._in_float(float_layers)}
            observation = self._observe(in_float)
            self._hand_over_ranges(observation.graph_module)
        corrections = {
            path: correction
            for path, correction in self.corrections_with(float_layers).items()
            if path not in float_layers
        }
        try:
            with quiet():
                reference = converted(
                    observation,
                    self.rounded_layer,
                    self.rounded_products,
                    self.weight_observer,
                    corrections,
                )
                if not flat:
                    _return(reference, self.traced.results)
                compiled = build(reference, self._example, writes=False)  # tracing took them out
        except UnsupportedError:
            raise
        except Exception as error:  # lowering meets graphs of all kinds
            raise UnsupportedError(f"it cannot be converted ({first_line(error)})") from error
        _name_float_sources(compiled.graph_module, reference)
        return compiled

    def check_build(self, *, flat: bool) -> None:
        """Build the part as it will be asked for first, to see that it can be, and be saved.

        Raises:
            UnsupportedError: it cannot.
        """
        built = self._built[(frozenset(), flat)] = self.build(flat=flat)
        check_savable(built, self.traced if flat else None)
        for call in self._others:  # float layers take ranks that int8 ones do not
            try:
                call(built)
            except Exception as error:  # its axes are those of the example
                raise UnsupportedError(
                    f"in int8 it fails on {call}: {first_line(error)}"
                ) from error

    def _check_prepared(self, inputs: Call, expected: tuple[Any, ...]) -> None:
        """That the graph computes with observers what it does without, which is ``expected``."""
        with torch.no_grad():
            actual = Interpreter(self.prepared, graph=self.float_graph).run(*inputs.args)
        if (reason := difference(expected, tuple(actual))) is not None:
            raise UnsupportedError(f"observers change it: {reason}")

    def _observe(self, in_float: Collection[str]) -> Observation:
        return observed(self.float_module, self.ranges.activation, in_float)

    def _put_observers(self) -> None:
        self._observation = self._observe(self._not_float)
        self.prepared = self._observation.graph_module
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
            for source in self._sources(node):
                group = groups.get(source, groups[node])
                if group is not groups[node]:
                    group += groups[node]
                    groups.update(dict.fromkeys(groups[node], group))
        linked = {node for node in groups if any(self._multiplies(one) for one in groups[node])}
        if not linked:
            return set()
        apart = {node for node in groups if node not in linked}
        return {node.name for node in (*apart, *self._joined_behind(groups.keys() - apart))}

    def _joined_behind(self, int8: Set[Node]) -> list[Node]:
        """Steps behind the last product that join ``int8`` with what torch computes in float.

        In int8 they would round that for nobody: the sum with a position embedding, say, on which a
        whole transformer builds.
        """
        nodes = list(self.prepared.graph.nodes)
        feeding = self._feeding_products(nodes)
        found: list[Node] = []
        for node in nodes:
            if node not in int8 or node in feeding or kind_of(node, self.module(node)) not in JOINS:
                continue
            sources = self._sources(node)
            if any(x.op != "placeholder" and (x not in int8 or x in found) for x in sources):
                found.append(node)
        return found

    @property
    def has_products(self) -> bool:
        """Whether it multiplies by weights, or one tensor by another."""
        return any(_is_product(node, self.module(node)) for node in self.prepared.graph.nodes)

    def _behind_products(self) -> set[str]:
        """The names of steps between last products, which give floats, and the results.

        In int8 they would round what nobody reads as codes: upsampled classes of pixels, or boxes.
        """
        nodes = list(self.prepared.graph.nodes)
        feeding = self._feeding_products(nodes)
        found: set[Node] = set()
        starts = {x for x in nodes if x not in feeding and self._may_give_floats(x)}
        int8 = {node for node in nodes if self._is_known(node)}
        for node in nodes:
            if node not in int8 or node in feeding or _is_product(node, self.module(node)):
                continue
            sources = set(self._sources(node))
            if not (sources & int8) - starts - found:
                found.add(node)
        return {node.name for node in found}

    def _feeding_products(self, nodes: Sequence[Node]) -> set[Node]:
        """Those of ``nodes`` that a product is computed from, which themselves do not count."""
        feeding: set[Node] = set()
        for node in reversed(nodes):
            if node in feeding or _is_product(node, self.module(node)):
                feeding.update(node.all_input_nodes)
        return feeding

    def _is_known(self, node: Node) -> bool:
        """Whether ``node`` becomes int8, and is not float with a result that is rounded."""
        return node.name in self._observation.int8

    def _multiplies(self, node: Node) -> bool:
        """Whether ``node``, or what is computed as one with it, is a product with weights."""
        while True:
            module = self.module(node)
            if _is_product(node, module):
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
            kind = _kind(module) if module is not None else _name(node.target)
            name = node.name if module is None else str(node.target)
            yield Layer(name, node, kind, scopes.get(node.name, ""))

    def _in_float(self, float_layers: Collection[str]) -> set[Node]:
        """The nodes of the layers named, and those that only move what float layers produce."""
        fused = self._with_fused(float_layers)
        int8 = {layer.node.name for layer in self.layers if layer.name not in float_layers}
        int8 |= self._observation.unfinished
        found: set[Node] = set()
        for node in self.prepared.graph.nodes:
            sources = [self._unobserved(x) for x in node.all_input_nodes]
            named = node.name in fused or (node.op == "call_module" and node.target in float_layers)
            moves = node.name not in int8 and bool(sources) and all(x in found for x in sources)
            if named or moves:
                found.add(node)
        return found

    def _unobserved(self, node: Node) -> Node:
        return node if self.observer_of(node) is None else node.all_input_nodes[0]

    def _sources(self, node: Node) -> Iterator[Node]:
        """What ``node`` reads, without observers and what is computed as one with it."""
        within = self._observation.inside | self._observation.unfinished
        for source in map(self._unobserved, node.all_input_nodes):
            if source.name in within:
                yield from self._sources(source)
            else:
                yield source

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
            if node.op == "call_module" and is_observer(prepared.get_submodule(str(node.target))):
                prepared.set_submodule(str(node.target), known[node.args[0].name])


def is_weighted(module: nn.Module | None) -> bool:
    """Whether ``module`` is a convolution or linear, whose weight becomes int8."""
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


_PLAIN_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _is_product(node: Node, module: nn.Module | None) -> bool:
    return is_weighted(module) or is_recurrent_layer(module) or node.target in PRODUCTS


def _return(gm: GraphModule, results: Structure) -> None:
    """Let ``gm``, which returns a tuple of tensors, return ``results`` made of them."""
    output = next(node for node in gm.graph.nodes if node.op == "output")
    output.args = (results.fill(list(output.args[0])),)
    gm.recompile()


def _name_float_sources(compiled: GraphModule, reference: GraphModule) -> None:
    """Note on each node of the compiled graph which node of the float graph it stands for."""
    floats = {
        node.name: node.args[0].name for node in reference.graph.nodes if node.target is rounded
    }
    for node in compiled.graph.nodes:
        source = node.meta.get("source")
        if "qparams" in node.meta and source in floats:
            node.meta["float_source"] = floats[source]
        elif is_op(node, "conv_real", "linear_real"):
            node.meta["float_source"] = floats.get(source, source)


def _kind(module: nn.Module) -> str:
    """The class of ``module``; of a layer of a recurrent one, torch's."""
    return LAYERS.get(type(module), type(module)).__name__


def _name(target: object) -> str:
    return str(getattr(target, "__name__", target))
