"""``torch.compile(model, backend="x86quant")``.

Torch finds the backend by the entry point in pyproject.toml, so nothing needs to be imported. It
takes the graphs that hold x86quant's ops (an exported program of a compiled model) or PT2E's
``quantized_decomposed`` ops; a graph with neither runs as it is. So does one that calls a compiled
model, which is one op that runs natively: see ``x86quant.compiled.traced``.

Dynamo cannot follow stock quantized tensors: it leaves a model converted by ``convert_fx`` to the
stock engine, op by op. ``x86quant.compile`` such a model first.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.compiled.module import CompiledModule
from x86quant.errors import X86QuantWarning
from x86quant.lowering import FloatNode, lower
from x86quant.lowering.from_export import is_decomposed
from x86quant.lowering.graph_tools import own_call
from x86quant.lowering.lower import computes_in_float

#: Layers that a warning names.
_SHOWN = 8


def x86quant(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend: what runs in place of ``gm``, a graph made by Dynamo."""
    nodes = gm.graph.nodes
    if not any(own_call(node) or is_decomposed(node) for node in nodes):
        return gm
    return _Lazy(gm)


class _Lazy:
    """Compiles ``gm`` at its first call, when weights and inputs are there and not fake."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._static = [_is_weight(node) for node in placeholders]
        self._weights: tuple[Any, ...] = ()
        self._places: tuple[int, ...] = ()
        self._compiled: CompiledModule | None = None
        self._told = False
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Run on the graph's inputs, weights among them."""
        weights = tuple(a for a, static in zip(args, self._static, strict=True) if static)
        inputs = tuple(a for a, static in zip(args, self._static, strict=True) if not static)
        with self._lock:
            places = tuple(weight.data_ptr() for weight in weights)
            same = places == self._places and _same(weights, self._weights)
            # Writes in place are the compiled module's to notice: it has the same memory.
            if self._compiled is None or not same:
                self._compiled = _compiled(_with_weights(self._gm, self._static, weights), inputs)
                self._weights, self._places = weights, places
                if not self._told:
                    self._told = True
                    _tell(self._compiled.float_nodes)
            compiled = self._compiled
        return compiled(*inputs)


def _tell(float_nodes: Sequence[FloatNode]) -> None:
    """Say which layers stayed in float."""
    layers = list(dict.fromkeys(node.layer for node in float_nodes))
    if layers:
        more = f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
        warnings.warn(
            f"torch.compile(backend='x86quant'): in float stay {', '.join(layers[:_SHOWN])}{more}",
            X86QuantWarning,
            stacklevel=3,
        )


def _is_weight(node: Node) -> bool:
    """Whether a placeholder is a parameter or buffer of the model."""
    value = node.meta.get("example_value")
    marked = "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    return marked or isinstance(value, nn.Parameter)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _with_weights(gm: GraphModule, static: Sequence[bool], weights: Sequence[Any]) -> GraphModule:
    """``gm`` with its weights as constants, not inputs."""
    root = nn.Module()
    for name, module in gm.named_children():
        root.add_module(name, module)
    for name, buffer in gm.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    graph = Graph()
    values: dict[Node, Node] = {}
    is_static, remaining = iter(static), iter(weights)
    for node in gm.graph.nodes:
        if node.op == "placeholder" and next(is_static):
            root.register_buffer(f"static_{node.name}", next(remaining).detach())
            values[node] = graph.get_attr(f"static_{node.name}")
        else:
            values[node] = graph.node_copy(node, lambda n: values[n])
    return GraphModule(root, graph)


def _compiled(gm: GraphModule, inputs: tuple[Any, ...]) -> CompiledModule:
    if any(map(is_decomposed, gm.graph.nodes)):
        lowering = lower(gm, inputs)
        return CompiledModule(lowering.graph_module, lowering.reports, lowering.float_nodes)
    for node in list(gm.graph.nodes):
        if (call := own_call(node)) is not None:
            node.target, node.args, node.kwargs = call[0], (), call[1]
    gm.recompile()
    floats = [FloatNode.of(gm, node) for node in gm.graph.nodes if computes_in_float(node)]
    return CompiledModule(gm, (), tuple(floats))
