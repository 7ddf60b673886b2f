"""A model as one graph in which its compiled parts stand with all that is known of their nodes.

They are opaque while torch.export sees what surrounds them, and put back in their places then.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from x86quant.calling.state import with_shared_tensors
from x86quant.capture.exported import Sizes, exported_once
from x86quant.capture.opaque_parts import SEEN, OpaquePart, PartCall, calls_seen, is_part
from x86quant.capture.traced_graph import Traced
from x86quant.compiled import CompiledModule
from x86quant.compiled.traced import output_of
from x86quant.errors import UnsupportedError
from x86quant.forms.call_form import CallForm, Structure
from x86quant.lowering.from_export import exported_layer
from x86quant.lowering.graph_tools import attribute, label, own_call

_PREFIX = re.compile(r"^inner(\.|$)")


def exported_whole(
    model: nn.Module, form: CallForm, leaves: Sequence[torch.Tensor], sizes: Sizes
) -> Traced:
    """``model`` with its hooks as torch.export traces it, with the free sizes ``sizes``.

    Raises:
        UnsupportedError: it cannot be exported; says why.
    """
    parts = {module: path for path, module in model.named_modules() if is_part(module)}
    # A copy of the structure alone, with the same tensors.
    memo: dict[int, Any] = {id(part): OpaquePart(part) for part in parts}
    try:
        surroundings = with_shared_tensors(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be copied: {error}") from error
    with calls_seen():
        traced = exported_once(surroundings, form, leaves, sizes, whole=True)
        gm = _PutBack(parts, leaves).graph_module(traced.graph_module)
    return dataclasses.replace(traced, graph_module=gm)


class _PutBack:
    """Puts parts back, whose paths are known."""

    def __init__(self, paths: Mapping[nn.Module, str], leaves: Sequence[torch.Tensor]) -> None:
        self._paths, self._leaves = paths, leaves

    def graph_module(self, flat: GraphModule) -> GraphModule:
        """The exported graph ``flat`` with the graphs of the parts in it."""
        graph = Graph()
        constants: dict[str, Any] = {}
        values: dict[Node, Any] = {}
        results: dict[Node, Any] = {}  # of the parts
        leaves = iter(self._leaves)
        for node in flat.graph.nodes:
            if node.op == "placeholder":
                new = graph.placeholder(str(node.target))
                example = next(leaves)
                new.meta.update(shape=tuple(example.shape), input_dtype=example.dtype)
                values[node] = new
            elif node.op == "output":
                graph.output(torch.fx.node.map_arg(node.args[0], lambda n: values[n]))
            elif node.target is torch.ops.x86quant_capture.part.default:
                inputs, number = node.args
                called = [values[x] for x in inputs]
                results[node] = self._called(graph, SEEN.calls[number], called, constants)
            elif node.args and isinstance(node.args[0], Node) and node.args[0] in results:
                values[node] = results[node.args[0]][node.args[1]]
            else:
                values[node] = _copied(graph, node, values)
                if node.op == "get_attr":
                    path = _PREFIX.sub("", str(node.target)) or "model"
                    if hasattr(GraphModule, path.partition(".")[0]):  # its own code, say
                        path = f"model_{path}"
                    values[node].target = path
                    constants[path] = attribute(flat, str(node.target))
        return _graph_module(constants, graph)

    def _called(
        self, graph: Graph, call: PartCall, inputs: Sequence[Node], constants: dict[str, Any]
    ) -> list[Node]:
        """The results of a part, in order, after what it does was added to ``graph``."""
        path = self._paths[call.part]
        if isinstance(call.part, CompiledModule):
            return self._inlined(graph, path, call.part, inputs, constants)
        constants[path] = call.part
        args, kwargs = call.called.fill(inputs)
        node = graph.call_module(path, args, kwargs)
        node.meta["layer"] = path
        assert call.result is not None
        return _items(graph, node, call.result)

    def _inlined(
        self,
        graph: Graph,
        path: str,
        part: CompiledModule,
        inputs: Sequence[Node],
        constants: dict[str, Any],
    ) -> list[Node]:
        """The nodes of a compiled part in ``graph``, and its results."""
        own = part.graph_module
        inner: dict[Node, Node] = {}
        given = iter(inputs)
        for node in own.graph.nodes:
            if node.op == "placeholder":
                inner[node] = next(given)
            elif node.op != "output":
                inner[node] = graph.node_copy(node, lambda n: inner[n])
                inner[node].meta = {**node.meta, "layer": f"{path}.{label(node)}"}
                if node.op in ("get_attr", "call_module"):
                    target = f"{path}.{node.target}"
                    inner[node].target = target
                    constants[target] = attribute(own, str(node.target))
        return [inner[node] for node in output_of(own.graph)[1]]


def _items(graph: Graph, node: Node, structure: Structure) -> list[Node]:
    """The tensors of ``structure``, which ``node`` returns, in order."""
    if structure.kind is None:
        return [node]
    return [
        leaf
        for number, part in enumerate(structure.parts)
        for leaf in _items(graph, graph.call_function(operator.getitem, (node, number)), part)
    ]


def _copied(graph: Graph, node: Node, values: dict[Node, Any]) -> Node:
    new = graph.node_copy(node, lambda n: values[n])
    new.meta = {}
    if node.op != "get_attr" and (layer := _PREFIX.sub("", exported_layer(node))):
        new.meta["layer"] = layer
    own = own_call(new)
    if own is not None:  # the runtime reads arguments of our ops by name
        new.args, new.kwargs = (), own[1]
    return new


def _graph_module(constants: Mapping[str, Any], graph: Graph) -> GraphModule:
    """A graph module of its own with ``constants`` by path."""
    root = nn.Module()
    for path, value in constants.items():
        *parents, name = path.split(".")
        home = root
        for parent in parents:
            if parent not in home._modules:
                home.add_module(parent, nn.Module())
            home = home.get_submodule(parent)
        if isinstance(value, torch.Tensor):
            home.register_buffer(name, value.detach())
        else:
            setattr(home, name, value)
    gm = GraphModule(root, graph, class_name="CapturedGraph").eval()
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
