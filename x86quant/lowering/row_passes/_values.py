"""What the passes ask about values, type and sizes as export found them, and who quantizes one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.graph_tools import emit, is_op


def value_of(node: object) -> torch.Tensor | None:
    """The fake tensor that stands for the value of ``node``."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def sizes(node: object) -> tuple[str, ...] | None:
    """The sizes of a tensor; sizes that are free have names, so equal texts are equal sizes."""
    value = value_of(node)
    return None if value is None else tuple(str(size) for size in value.shape)


def is_float32(*nodes: object) -> bool:
    """Whether all of ``nodes`` are float32 tensors."""
    return all((v := value_of(node)) is not None and v.dtype is torch.float32 for node in nodes)


def same_sizes(a: object, b: object) -> bool:
    """Whether both are tensors of the same sizes."""
    return sizes(a) is not None and sizes(a) == sizes(b)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of an aten op, wherever it is given."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def is_alone(node: Node) -> bool:
    """Whether exactly one node reads ``node``, in one place."""
    return len(node.users) == 1 and sum(n is node for n in _read(next(iter(node.users)))) == 1


def _read(user: Node) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg((user.args, user.kwargs), lambda n: found.append(n))
    return found


def call(graph: Graph, target: Any, value: torch.Tensor | None, *args: Any, **kwargs: Any) -> Node:
    """A call of an aten op whose value is like ``value``."""
    node = graph.call_function(target, args, kwargs)
    if value is not None:
        node.meta["val"] = value
    return node


def emit_many(
    graph: Graph, name: str, like: Node, values: Sequence[torch.Tensor | None], /, **kwargs: Any
) -> tuple[Node, ...]:
    """A call of our op ``name``, which returns several values, and the nodes of these.

    ``like`` tells which layer it belongs to.
    """
    node = emit(graph, name, like, **kwargs)
    items = []
    for number, value in enumerate(values):
        item = graph.call_function(operator.getitem, (node, number))
        if value is not None:
            item.meta["val"] = value
        items.append(item)
    return (node, *items)


def item_of(node: object, number: int, *names: str) -> Node | None:
    """The node of our ops ``names`` whose result ``number`` is ``node``, or None."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    source, index = node.args
    return source if index == number and is_op(source, *names) else None  # type: ignore[return-value]


def items(node: Node) -> dict[int, Node]:
    """The nodes that take results of ``node``, by number."""
    return {int(n.args[1]): n for n in node.users if n.target is operator.getitem}  # type: ignore[arg-type]


def quantizer_of(value: Node) -> Node | None:
    """The ``quantize_rows`` that reads ``value``, or None. There is one at most."""
    return next((user for user in value.users if is_op(user, "quantize_rows")), None)


def take_over(gm: GraphModule, quantizer: Node, results: dict[int, Node]) -> None:
    """Let ``results`` stand for the codes, scales and zero points of ``quantizer``; it goes."""
    for number, item in items(quantizer).items():
        item.replace_all_uses_with(results[number])
        gm.graph.erase_node(item)
    gm.graph.erase_node(quantizer)


def size_node(node: Node, dim: int, size: Any) -> Node:
    """The number of places of ``node`` along ``dim``, whose value is ``size``."""
    found = node.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    found.meta["val"] = size
    return found


def size_of_input(graph: Graph, size: Any) -> Node | None:
    """``size``, which is free, read off an input that has it, if any.

    Whoever looks for the readers of a computed value does not meet it there.
    """
    for given in graph.find_nodes(op="placeholder"):
        for dim, known in enumerate(sizes(given) or ()):
            if known == str(size):
                return size_node(given, dim, size)
    return None
