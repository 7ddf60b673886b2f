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

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.compiled.module import CompiledModule
from x86quant.compiled.traced import run_compiled
from x86quant.errors import X86QuantWarning
from x86quant.lowering import lower
from x86quant.lowering.from_export import exported_layer, is_decomposed
from x86quant.lowering.graph_tools import own_call
from x86quant.packing.linear_dynamic import Stamp, stamp


def x86quant(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend: what runs in place of ``gm``, a graph made by Dynamo."""
    if not any(map(is_decomposed, gm.graph.nodes)):
        _tell([_layer_of(node) for node in gm.graph.nodes if _is_float_layer(node)])
    if any(_is_to_be_compiled(node) for node in gm.graph.nodes):
        return _Lazy(gm)
    return gm


#: What torch calls layers with weights when they are functions.
_FLOAT_LAYERS: frozenset[Any] = frozenset(
    {torch._C._nn.linear, torch.addmm, torch.conv1d, torch.conv2d, torch.conv3d}
    | {torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d}
)
#: Of which layers it was said that they are float: a model is compiled again for other sizes.
_told: set[tuple[str, ...]] = set()
_NAMED = 5


def _is_float_layer(node: Node) -> bool:
    """Whether ``node`` multiplies by a float weight of the model."""
    if node.op != "call_function" or node.target not in _FLOAT_LAYERS:
        return False
    return any(
        isinstance(x, Node) and (x.op == "get_attr" or (x.op == "placeholder" and _is_weight(x)))
        for x in node.args
    )


def _layer_of(node: Node) -> str:
    """The path of the layer whose code ``node`` is, else its own name."""
    return exported_layer(node) or node.name


def _tell(layers: Sequence[str]) -> None:
    """Warn once that ``layers`` run in float."""
    found = tuple(dict.fromkeys(layers))
    if not found or found in _told:
        return
    _told.add(found)
    names = ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
    what = "1 layer stays" if len(found) == 1 else f"{len(found)} layers stay"
    warnings.warn(
        f"{what} in float under torch.compile(backend='x86quant'): {names}; the backend runs what "
        "is int8 already: call x86quant.quantize or x86quant.to_dynamic first",
        X86QuantWarning,
        stacklevel=2,
    )


def _is_to_be_compiled(node: Node) -> bool:
    call = own_call(node)
    return is_decomposed(node) or (call is not None and call[0] is not run_compiled())


class _Lazy:
    """Compiles ``gm`` at its first call, when weights and inputs are there and not fake."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._static = [_is_weight(node) for node in placeholders]
        self._weights: tuple[Any, ...] = ()
        self._stamp: Stamp = ()
        self._compiled: CompiledModule | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Run on the graph's inputs, weights among them."""
        weights = tuple(a for a, static in zip(args, self._static, strict=True) if static)
        inputs = tuple(a for a, static in zip(args, self._static, strict=True) if not static)
        with self._lock:
            now = stamp(*weights)
            if self._compiled is None or now != self._stamp or not _same(weights, self._weights):
                self._compiled = _compiled(_with_weights(self._gm, self._static, weights), inputs)
                self._weights, self._stamp = weights, now
            compiled = self._compiled
        return compiled(*inputs)


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


def _is_product(op: str) -> bool:
    return op.startswith(("convolution", "linear"))


def _compiled(gm: GraphModule, inputs: tuple[Any, ...]) -> CompiledModule:
    if any(map(is_decomposed, gm.graph.nodes)):
        lowering = lower(gm, inputs)
        _tell([node.layer for node in lowering.float_nodes if _is_product(node.op)])
        return CompiledModule(lowering.graph_module, lowering.reports, lowering.float_nodes)
    for node in list(gm.graph.nodes):
        if (call := own_call(node)) is not None:
            node.target, node.args, node.kwargs = call[0], (), call[1]
    gm.recompile()
    return CompiledModule(gm)
