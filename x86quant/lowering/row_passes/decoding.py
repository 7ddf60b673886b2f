"""The newest tokens of a decoder: attention to its cache, and whose logits are wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from x86quant.lowering.graph_tools import emit, finish, is_op, nodes_of
from x86quant.lowering.row_passes._values import call, is_float32, sizes, value_of

aten = torch.ops.aten


#: The input with keys and values [2 layers, batch, heads, tokens, size], the one that says how many
#: tokens in front nobody sees, and the one that is added: how many tokens the cache holds.
CACHE, HIDDEN, LENGTH = "past", "hidden", "length"


def attend_to_cache(gm: GraphModule) -> int:
    """Attention of new tokens reads a cache where it lies, and adds their own keys and values.

    The cache is one of floats; ``with_int8_cache`` makes it one of codes.

    What is held with the new token leaves the graph's results: it is in the cache.

    Returns the number of attentions that read the cache.
    """
    cache = next((n for n in gm.graph.nodes if n.op == "placeholder" and n.target == CACHE), None)
    if cache is None:
        return 0
    found = [
        (node, layer, hidden, new)
        for node in nodes_of(gm, "attention")
        if (given := _given(node, cache)) is not None
        for layer, hidden, *new in [given]
    ]
    if not found:
        return 0
    length = _length(gm, cache)
    for node, layer, hidden, new in found:
        with gm.graph.inserting_before(node):
            k, v = (call(gm.graph, aten.transpose.int, _swapped(value_of(x)), x, 1, 2) for x in new)
            out = emit(
                gm.graph,
                "cached_attention",
                node,
                q=node.kwargs["q"],
                k=k,
                v=v,
                cache=cache,
                layer=layer,
                length=length,
                hidden=hidden,
                scale=node.kwargs["scale"],
            )
            out.meta["val"] = value_of(node)
        node.replace_all_uses_with(out)
        gm.graph.erase_node(node)
    _leave_out_joined(gm, cache)
    return finish(gm, len(found))


def _given(node: Node, cache: Node) -> tuple[int, Node, Node, Node] | None:
    """The layer of an attention to all that the cache holds of it, what hides some of that, and
    the new keys and values.
    """
    kwargs: Any = node.kwargs
    mask, new = kwargs["mask"], (sizes(kwargs["q"]) or ())[1:2]
    if kwargs["causal"] or not is_op(mask, "newest_sees"):
        return None
    hidden = mask.kwargs["hidden"]
    if hidden.op != "placeholder" or hidden.target != HIDDEN:
        return None
    k, v = (_joined(_untransposed(kwargs[name]), cache, new) for name in "kv")
    if k is None or v is None or k[0] % 2 or v[0] != k[0] + 1:
        return None
    return k[0] // 2, hidden, k[1], v[1]


def _untransposed(node: Any) -> Any:
    swaps = isinstance(node, Node) and node.target is aten.transpose.int
    return node.args[0] if swaps and node.args[1:] == (1, 2) else None


def _joined(
    node: Any, cache: Node, tokens: tuple[str, ...] | None = None
) -> tuple[int, Node] | None:
    """Which part of the cache ``node`` joins with so many new tokens, and the tokens."""
    if not isinstance(node, Node) or node.target is not aten.cat.default:
        return None
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    parts: Any = node.args[0]
    if dim not in (2, -2) or len(parts) != 2:
        return None
    held, new = parts
    if held.target is not aten.select.int or held.args[:2] != (cache, 0):
        return None
    of_new = (sizes(new) or ())[2:3]
    return (int(held.args[2]), new) if tokens in (None, of_new) else None


def _swapped(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.transpose(1, 2)


def _length(gm: GraphModule, cache: Node) -> Node:
    """A new input, behind the others."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    with gm.graph.inserting_after(inputs[-1]):
        length = gm.graph.placeholder(LENGTH)
    value = value_of(cache)
    if value is not None:
        length.meta["val"] = value.new_empty((1,), dtype=torch.int64)
    return length


def _leave_out_joined(gm: GraphModule, cache: Node) -> None:
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    results: Any = output.args[0]
    output.args = (tuple(n for n in results if _joined(n, cache) is None),)


#: The input that is added behind the others.
SCALES = "scales"


def with_int8_cache(gm: GraphModule) -> GraphModule:
    """``gm``, whose attention extends a cache, with one of codes and, as its last input, scales.

    It has the tensors of ``gm``, which stays as it is.
    """
    graph = Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copied))
    cache = next(n for n in graph.nodes if n.op == "placeholder" and n.target == CACHE)
    cache.meta.pop("val", None)  # of floats
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        scales = graph.placeholder(SCALES)
    for node in [*graph.nodes]:
        if not is_op(node, "cached_attention"):
            continue
        with graph.inserting_before(node):
            out = emit(graph, "int8_cached_attention", node, **node.kwargs, scales=scales)
        if "val" in node.meta:
            out.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(out)
        graph.erase_node(node)
    return GraphModule(gm, graph)


def take_tokens(gm: GraphModule) -> int:
    """The tokens whose logits are wanted are taken by an op of ours, without leaving native code.

    Returns the number of places where tokens are taken.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.target is not aten.index.Tensor or len(node.args) != 2:
            continue
        x, indices = node.args
        shown, places = value_of(x), _second_index(indices)
        numbers = value_of(places)
        if shown is None or shown.dim() != 3 or numbers is None or not is_float32(x):
            continue
        if numbers.dtype is not torch.int64 or numbers.dim() != 1:
            continue
        with gm.graph.inserting_before(node):
            taken = emit(gm.graph, "take_tokens", node, x=x, places=places)
            taken.meta["val"] = value_of(node)
        node.replace_all_uses_with(taken)
        gm.graph.erase_node(node)
        changed += 1
    return finish(gm, changed)


def _second_index(indices: Any) -> Any:
    """The index of the second dimension, if there is no other."""
    found = list(indices)
    return found[1] if len(found) == 2 and found[0] is None else None
