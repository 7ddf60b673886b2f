"""A graph module as values that can be pickled, whatever its graph does.

torch.fx pickles a graph as its code and traces that anew, which fails where the code writes to a
slice or makes a tensor of sizes, and loses what is known of each node.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import _get_qualified_name, map_aggregate


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlace:
    """Stands for the node of this number."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class OpName:
    """Stands for an op of torch."""

    name: str

    def op(self) -> torch._ops.OpOverload:
        """The op."""
        space, _, rest = self.name.partition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space), name)
        found: torch._ops.OpOverload = getattr(packet, overload or "default")
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class TorchName:
    """Stands for a function or constant of torch whose home pickle cannot always name."""

    name: str

    def value(self) -> Any:
        """The function or constant."""
        home, _, name = self.name.rpartition(".")
        return getattr(functools.reduce(getattr, home.split(".")[1:], torch), name)


@dataclasses.dataclass(frozen=True, slots=True)
class PlainGraph:
    """A graph module.

    Attributes:
        name: its class's.
        home: a module with what the graph reads and calls.
        nodes: kind, name, target, arguments and metadata of each node.
    """

    name: str
    home: nn.Module
    nodes: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, gm: GraphModule) -> PlainGraph:
        """``gm``, whose tensors and modules are shared."""
        home = nn.Module()
        for key, value in vars(gm).items():
            if key in ("_parameters", "_buffers", "_modules"):
                vars(home)[key] = dict(value)
        places = {node: NodePlace(number) for number, node in enumerate(gm.graph.nodes)}

        def stored(value: Any) -> Any:
            if isinstance(value, torch.memory_format):
                return TorchName(str(value))
            return places[value] if isinstance(value, Node) else value

        rows = []
        for node in gm.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload):
                target = OpName(str(target._schema.name) + "." + target._overloadname)
            elif isinstance(target, types.BuiltinFunctionType):
                name = _get_qualified_name(target)
                target = TorchName(name) if name.startswith("torch.") else target
            elif node.op == "get_attr" and not hasattr(home, target.partition(".")[0]):
                root = target.partition(".")[0]
                setattr(home, root, getattr(gm, root))  # neither tensor nor module
            arguments = map_aggregate((node.args, node.kwargs), stored)
            meta = {k: v for k, v in node.meta.items() if _is_simple(v)}
            rows.append((node.op, node.name, target, arguments, meta))
        return cls(type(gm).__name__, home, tuple(rows))

    def graph_module(self) -> GraphModule:
        """The graph module again."""
        graph = Graph()
        made: list[Node] = []

        def filled(value: Any) -> Any:
            if isinstance(value, OpName):
                return value.op()
            if isinstance(value, TorchName):
                return value.value()
            return made[value.number] if isinstance(value, NodePlace) else value

        for op, name, target, arguments, meta in self.nodes:
            args, kwargs = map_aggregate(arguments, filled)
            node = graph.create_node(op, filled(target), args, kwargs, name)
            node.meta.update(meta)
            made.append(node)
        found: GraphModule = GraphModule(self.home, graph, class_name=self.name).eval()
        return found


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_simple, value))
    if isinstance(value, dict):
        return all(map(_is_simple, value)) and all(map(_is_simple, value.values()))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
