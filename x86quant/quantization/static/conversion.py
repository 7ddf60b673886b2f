"""From an observed float graph to one that says what is int8, for lowering to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.graph_tools import add_constant, attribute
from x86quant.lowering.passes.floats import FLOAT_RESULTS
from x86quant.lowering.rounded import (
    FusedLayer,
    Int8Weight,
    RoundedLayer,
    RoundedRecurrent,
    rounded,
    rounded_weight,
)
from x86quant.observing.weights import ChannelRangesObserver
from x86quant.quantization.static.int8_forms import (
    WEIGHTED_FUNCTIONS,
    WEIGHTED_LAYERS,
    weight_axis,
)
from x86quant.quantization.static.observation import (
    Observation,
    core,
    int8_codes,
    is_observer,
    qparams_of_observer,
)
from x86quant.quantization.tracing.recurrent_layers import (
    is_recurrent_layer,
    returns_last,
    states_of,
)

#: Makes the observer of the weight of a step: by node and module.
WeightObservers = Callable[[Node, nn.Module | None], ChannelRangesObserver]
#: Gives a convolution or linear, which a node calls, with an int8 weight.
RoundedLayers = Callable[[Node, nn.Module], RoundedLayer]
#: Weights of a recurrent layer, and a bias for each.
Products = tuple[list[Int8Weight], list[torch.Tensor]]
#: Gives those of a recurrent layer, which a node calls.
RoundedProducts = Callable[[Node, nn.Module], Products]


def converted(
    observation: Observation,
    rounded_layers: RoundedLayers,
    products: RoundedProducts,
    weights: WeightObservers,
    corrections: Mapping[str, torch.Tensor],
) -> GraphModule:
    """The graph with values rounded where they were observed, and int8 weights.

    Args:
        observation: a calibrated graph; it is not changed.
        rounded_layers: gives layers with int8 weights.
        products: gives the int8 weights of recurrent layers.
        weights: makes the observers of all other weights.
        corrections: what is subtracted from the biases of layers, by path.
    """
    source = observation.graph_module
    modules = dict(source.named_modules(remove_duplicate=False))
    graph = Graph()
    values: dict[Node, Any] = {}
    layers: dict[str, nn.Module] = {}
    constants = nn.Module()
    for node in source.graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if is_observer(module):
            scale, zero_point = qparams_of_observer(module)
            source_node = node.args[0]
            arguments = (values[source_node], scale, zero_point)
            name = f"{source_node.name}_int8"
            values[node] = graph.create_node("call_function", rounded, arguments, name=name)
            continue
        values[node] = new = graph.node_copy(node, lambda one: values[one])
        if node.name not in observation.int8:
            continue
        layer = None if module is None else core(module)
        if layer is not None and is_recurrent_layer(layer):
            own = products(node, layer)
            found = rounded_recurrent(layer, own, *_qparams_around(node, layer, modules))
            # Another call has other ranges.
            new.target = str(node.target) if node.target not in layers else node.name
            layers[new.target] = found
            continue
        if type(layer) in WEIGHTED_LAYERS:
            path = str(node.target)
            if path not in layers:
                layers[path] = _rounded(node, module, rounded_layers, corrections.get(path))
        elif node.target in WEIGHTED_FUNCTIONS:
            constant = attribute(source, str(node.all_input_nodes[1].target))
            weight = _int8(constant, node, None, weights)
            with graph.inserting_before(new):
                codes = add_constant(constants, graph, f"{node.name}_codes", weight.codes)
                scales = add_constant(constants, graph, f"{node.name}_scales", weight.scales)
                known = graph.call_function(rounded_weight, (codes, scales, weight.axis))
            new.replace_input_with(values[node.all_input_nodes[1]], known)
    root: dict[str, Any] = {**dict(constants.named_buffers()), **layers}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and str(node.target) not in root:
            root[str(node.target)] = attribute(source, str(node.target))
    result = GraphModule(root, graph).eval()
    result.meta[FLOAT_RESULTS] = True
    if result.graph.eliminate_dead_code():
        result.recompile()
    return result


def _int8(
    weight: torch.Tensor, node: Node, layer: nn.Module | None, weights: WeightObservers
) -> Int8Weight:
    return Int8Weight(*int8_codes(weight, weights(node, layer)), weight_axis(node, layer))


def rounded_layer(node: Node, layer: Any, weights: WeightObservers) -> RoundedLayer:
    """``layer``, which ``node`` calls, with an int8 weight."""
    return RoundedLayer(layer, _int8(layer.weight, node, layer, weights), layer.bias)


def _rounded(
    node: Node, module: Any, rounded_layers: RoundedLayers, correction: torch.Tensor | None
) -> nn.Module:
    """``module``, which ``node`` calls, with an int8 weight and a corrected bias."""
    layer: Any = core(module)
    new = rounded_layers(node, layer)
    if correction is not None:
        old = correction.new_zeros(len(correction)) if layer.bias is None else layer.bias.detach()
        new = new.with_bias((old - correction).float())
    return FusedLayer(new, *list(module)[1:]) if isinstance(module, FusedLayer) else new


def _qparams_around(
    node: Node, layer: object, modules: Mapping[str, nn.Module]
) -> tuple[tuple[float, int], tuple[float, int]]:
    """Scale and zero point of what ``node`` reads, and of its result."""
    before, (behind, *_) = node.args[0], states_of(node, layer).users
    assert isinstance(before, Node)
    first, second = (qparams_of_observer(modules[str(x.target)]) for x in (before, behind))
    return first, second


def product_names(layer: Any) -> list[str]:
    """What its weights and biases are called, behind ``weight_`` and ``bias_``, in their order."""
    suffixes = ("_l0", "_l0_reverse") if layer.bidirectional else ("_l0",)
    kinds = ("ih", "hh", "hr") if layer.proj_size else ("ih", "hh")
    return [f"{kind}{suffix}" for suffix in suffixes for kind in kinds]


def rounded_products(node: Node, layer: Any, weights: WeightObservers) -> Products:
    """Int8 weights and biases of one recurrent ``layer``, which ``node`` calls."""
    found: Products = ([], [])
    for name in product_names(layer):
        weight = getattr(layer, f"weight_{name}").detach()
        bias = getattr(layer, f"bias_{name}", None)  # projections have none
        found[0].append(Int8Weight(*int8_codes(weight, weights(node, layer)), 0))
        found[1].append(
            torch.zeros(len(weight), dtype=torch.float32) if bias is None else bias.detach()
        )
    return found


def rounded_recurrent(
    layer: Any, products: Products, x_qparams: tuple[float, int], h_qparams: tuple[float, int]
) -> RoundedRecurrent:
    """One recurrent ``layer`` with the int8 weights ``products``."""
    kind = "lstm" if isinstance(layer, nn.LSTM) else "gru"
    return RoundedRecurrent(
        *products, kind, layer.batch_first, x_qparams, h_qparams, returns_last(layer)
    )


def weight_observer(
    make: type[ChannelRangesObserver], node: Node, layer: nn.Module | None
) -> ChannelRangesObserver:
    """The observer for the weight of ``node``, with a range for each output channel.

    Transposed convolutions have the same ranges in every group.
    """
    return make(ch_axis=weight_axis(node, layer))
