"""Recommenders as they are usually written: their lookups become one op, dot products another.

Lookups whose results are concatenated or stacked become one ``embedding_bags``, tables that stay in
float among them. ``bmm`` of stacked vectors with their own transpose, of which a constant choice of
pairs is taken, becomes ``interact``. Sizes are those of the example; the graph is proved later.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from x86quant.dynamic.convert import why_float
from x86quant.lowering.graph_tools import add_constant, own_call
from x86quant.lowering.views import is_reshape
from x86quant.ops.embedding import TableFormat, pairs_of

aten = torch.ops.aten

_JOINS = (torch.cat, torch.concat, torch.concatenate, aten.cat.default)
_STACKS = (torch.stack, aten.stack.default)
_PRODUCTS = (torch.bmm, torch.matmul, operator.matmul, aten.bmm.default, "bmm", "matmul")
_INDEXING = (operator.getitem, aten.index.Tensor)
_TRANSPOSES = (
    torch.transpose, torch.swapaxes, torch.swapdims, aten.transpose.int, "transpose", "swapaxes",
    "swapdims", torch.permute, aten.permute.default, "permute",
)  # fmt: skip
_UNSQUEEZES = (torch.unsqueeze, aten.unsqueeze.default, "unsqueeze")
_CONVERSIONS = ("to", "float", "detach")
_LOOKUPS = tuple(
    getattr(torch.ops.x86quant, name).default for name in ("embedding_bags", "embedding_rows")
)


def recognise_recommender(gm: GraphModule, inputs: Sequence[Any]) -> int:
    """Rewrite ``gm``, which takes ``inputs``; returns how much was found. Not yet recompiled."""
    modules = dict(gm.named_modules(remove_duplicate=False))
    if not any(map(_may_be_joined, gm.graph.nodes)):
        return 0
    seen = _Seen(gm, inputs)
    found = sum(_interaction(gm, node, seen) for node in list(gm.graph.nodes))
    joins = [n for n in gm.graph.nodes if n.target in (*_JOINS, *_STACKS)]
    found += sum(_merged_lookups(gm, node, modules, seen) for node in joins)
    if found:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
    return found


def _may_be_joined(node: Node) -> bool:
    """Whether ``node`` is a join or an index, as all that is looked for has."""
    if node.target is operator.getitem:
        return isinstance(node.args[1], tuple) and len(node.args[1]) == 3
    return node.target in (*_JOINS, *_STACKS, *_INDEXING)


class _Seen(Interpreter):
    """Sizes and types of all values for an example, and the values that follow from no input."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__(gm)
        self.sizes: dict[Node, tuple[int, ...]] = {}
        self.dtypes: dict[Node, torch.dtype] = {}
        self.constants: dict[Node, torch.Tensor] = {}
        with torch.no_grad():
            self.run(*inputs)

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, torch.Tensor):
            self.sizes[n], self.dtypes[n] = tuple(found.shape), found.dtype
            if n.op != "placeholder" and all(x in self.constants for x in n.all_input_nodes):
                self.constants[n] = found
        return found

    def rank(self, node: Node) -> int:
        """How many dimensions; 0 for what is no tensor."""
        return len(self.sizes.get(node, ()))


def _arguments(node: Node, *names: str) -> list[Any]:
    """The first arguments of a call, by position or by name; None for those that are missing."""
    given = [*node.args, *[None] * len(names)][: len(names)]
    return [node.kwargs.get(name, x) for name, x in zip(names, given, strict=True)]


def _joined(node: Node, kinds: Sequence[Any], seen: _Seen) -> list[Node] | None:
    """What ``node`` puts side by side along dimension 1, if it is a join of ``kinds``."""
    if node.target not in kinds:
        return None
    parts, dim = _arguments(node, "tensors", "dim")
    if dim is None:
        dim = node.kwargs.get("axis", 0)
    if not isinstance(parts, list | tuple) or not isinstance(dim, int):
        return None
    if dim not in (1, 1 - seen.rank(node)) or not all(isinstance(x, Node) for x in parts):
        return None
    return list(parts)


# --- interactions ---


def _interaction(gm: GraphModule, node: Node, seen: _Seen) -> int:
    """Let ``node``, which takes pairs of products of vectors, come from an ``interact``."""
    pairs = _pairs(node, seen)
    if pairs is None:
        return 0
    features, rows, columns = pairs
    parts = _features(features, seen)
    if parts is None:
        return 0
    dense, rest = parts
    count, size = seen.sizes[features][1:]
    places = _places(rows, columns, count)
    if not places:
        return 0
    every = places == list(range(pairs_of(count)))
    with gm.graph.inserting_before(node):
        vectors = _side_by_side(gm, rest, seen)
        vectors = gm.graph.call_method("reshape", (vectors, -1, count - 1, size))
        whole = gm.graph.call_function(
            torch.ops.x86quant.interact.default, (dense, vectors, None if every else places)
        )
    _note(whole, seen, node, size + (len(rows)))
    joins = [u for u in node.users if _follows(_joined(u, _JOINS, seen), dense, node)]
    for join in joins:
        _join_with(gm, join, dense, node, whole)
    if node.users:
        with gm.graph.inserting_before(node):
            products = gm.graph.call_function(
                operator.getitem, (whole, (slice(None), slice(size, None)))
            )
        node.replace_all_uses_with(products)
    return 1


def _note(node: Node, seen: _Seen, like: Node, width: int) -> None:
    seen.sizes[node], seen.dtypes[node] = (seen.sizes[like][0], width), torch.float32
    if "scope" in like.meta:
        node.meta["scope"] = like.meta["scope"]


def _pairs(node: Node, seen: _Seen) -> tuple[Node, list[int], list[int]] | None:
    """The vectors, and rows and columns of their products that ``node`` takes."""
    if node.target not in _INDEXING or len(node.args) != 2:
        return None
    products, index = node.args
    if not isinstance(products, Node) or not isinstance(index, list | tuple) or len(index) != 3:
        return None
    if index[0] not in (None, slice(None)) or products.target not in _PRODUCTS:
        return None
    found = [seen.constants.get(x) if isinstance(x, Node) else None for x in index[1:]]
    lists = [x.tolist() for x in found if x is not None and x.dim() == 1 and x.dtype == torch.int64]
    if len(lists) != 2 or len(lists[0]) != len(lists[1]) or len(products.args) != 2:
        return None
    a, b = products.args
    if not isinstance(a, Node) or not isinstance(b, Node) or seen.rank(a) != 3:
        return None
    if not _is_transpose(b, a) or seen.dtypes[a] != torch.float32:
        return None
    return a, lists[0], lists[1]


def _is_transpose(node: Node, of: Node) -> bool:
    if node.target is getattr and len(node.args) == 2:
        return node.args[0] is of and node.args[1] == "mT"
    if node.target not in _TRANSPOSES or not node.args or node.args[0] is not of:
        return False
    dims = node.args[1] if len(node.args) == 2 else node.args[1:]
    dims = [*dims, *node.kwargs.values()] if isinstance(dims, list | tuple) else dims
    if not isinstance(dims, list) or not all(isinstance(dim, int) for dim in dims):
        return False
    return [dim % 3 for dim in dims] in ([1, 2], [2, 1], [0, 2, 1])


def _features(node: Node, seen: _Seen) -> tuple[Node, list[Node]] | None:
    """The first of the vectors in ``node`` [samples, n, size], and what holds the others."""
    samples, count, size = seen.sizes[node]
    if (stacked := _joined(node, _STACKS, seen)) is not None:
        parts = stacked
    elif (joined := _joined(node, _JOINS, seen)) is not None:
        parts = joined
        first = parts[0]
        if first.target not in _UNSQUEEZES or first.args[1:] not in ((1,), (-2,)):
            return None
        assert isinstance(first.args[0], Node)
        parts = [first.args[0], *parts[1:]]
    elif is_reshape(node) and isinstance(node.args[0], Node):
        inner = _joined(node.args[0], _JOINS, seen)
        if inner is None or seen.sizes.get(node.args[0]) != (samples, count * size):
            return None
        parts = inner
    else:
        return None
    if seen.sizes.get(parts[0]) != (samples, size) or len(parts) < 2:
        return None
    for part in parts[1:]:
        own = seen.sizes.get(part, ())
        if len(own) not in (2, 3) or own[0] != samples or own[-1] % size:
            return None
    return parts[0], parts[1:]


def _side_by_side(gm: GraphModule, parts: list[Node], seen: _Seen) -> Node:
    """``parts`` [samples, n, size] or [samples, n * size] as one."""
    if len(parts) == 1:
        return parts[0]
    flat = [x if seen.rank(x) == 2 else gm.graph.call_method("flatten", (x, 1)) for x in parts]
    node = gm.graph.call_function(torch.cat, (flat, 1))
    width = sum(_width(seen.sizes[part]) for part in parts)
    _note(node, seen, parts[0], width)
    return node


def _width(sizes: tuple[int, ...]) -> int:
    return sizes[1] * sizes[2] if len(sizes) == 3 else sizes[1]


def _places(rows: list[int], columns: list[int], count: int) -> list[int] | None:
    """Where the products are among those of an interaction, if they are of its vectors."""
    found = []
    for a, b in zip(rows, columns, strict=True):
        if not (-count <= a < count and -count <= b < count):
            return None
        low, high = sorted((a % count, b % count))
        found.append(pairs_of(count) + low if low == high else pairs_of(high) + low)
    return found


def _follows(parts: list[Node] | None, dense: Node, products: Node) -> bool:
    """Whether ``products`` follow ``dense`` in ``parts``, once."""
    if parts is None or parts.count(products) != 1:
        return False
    at = parts.index(products)
    return at > 0 and parts[at - 1] is dense


def _join_with(gm: GraphModule, join: Node, dense: Node, products: Node, whole: Node) -> None:
    parts = list(_arguments(join, "tensors")[0])
    at = parts.index(products)
    assert parts[at - 1] is dense
    parts[at - 1 : at + 1] = [whole]
    if len(parts) == 1:
        join.replace_all_uses_with(whole)
        gm.graph.erase_node(join)
        return
    join.args, join.kwargs = (parts, 1), {}


# --- lookups ---


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """One lookup, as operands of ``embedding_bags``; ``rows`` is a node, or a tensor to be."""

    node: Node
    name: str
    rows: Node | torch.Tensor
    numbers: Sequence[int]
    indices: Node
    offsets: Node | None = None
    weights: Node | None = None
    last_offset: bool = False
    of_ids: bool = False  # indices are one-dimensional, one for each bag

    @property
    def form(self) -> tuple[bool, ...]:
        """What must be the same for all lookups of one op."""
        return self.offsets is not None, self.weights is not None, self.last_offset

    @classmethod
    def of_module(cls, node: Node, module: Any, seen: _Seen) -> _Lookup | None:
        """The call of a float table; None if the op could not do it."""
        names = ("input", "offsets", "per_sample_weights")
        indices, offsets, weights = _arguments(node, *names)
        of_ids = isinstance(module, nn.Embedding)
        if not isinstance(indices, Node) or why_float(module) or module.max_norm is not None:
            return None
        if seen.rank(indices) != (1 if of_ids or offsets is not None else 2):
            return None
        if isinstance(offsets, Node) and seen.dtypes[offsets] != seen.dtypes[indices]:
            return None
        if isinstance(weights, Node) and seen.dtypes[weights] != torch.float32:
            return None
        table = module.weight.detach()
        if table.dtype != torch.float32 or table.device.type != "cpu":
            return None
        padding = None if of_ids else module.padding_idx
        form = TableFormat(
            table.shape[1], 32, mode="sum" if of_ids else module.mode,
            padding=-1 if padding is None else padding,
        )  # fmt: skip
        rows = table.contiguous().view(torch.uint8)
        last = not of_ids and offsets is not None and bool(module.include_last_offset)
        name = str(node.target)
        return cls(node, name, rows, form.numbers, indices, offsets, weights, last, of_ids)

    @classmethod
    def of_op(cls, node: Node, arguments: Mapping[str, Any], seen: _Seen) -> _Lookup | None:
        """A call of ``embedding_bags`` for one table, or of ``embedding_rows``."""
        if "ids" in arguments:
            if seen.rank(arguments["ids"]) != 1:
                return None
            rows, ids, numbers, name = (arguments[x] for x in ("rows", "ids", "form", "name"))
            return cls(node, name, rows, numbers, ids, of_ids=True)
        if len(arguments["names"]) != 1:
            return None
        indices, offsets, weights = (
            _converted(next(iter(arguments[name]), None), seen)
            for name in ("indices", "offsets", "weights")
        )
        assert isinstance(indices, Node)
        return cls(
            node,
            arguments["names"][0],
            arguments["rows"][0],
            arguments["formats"],
            indices,
            offsets,
            weights,
            last_offset=bool(arguments["include_last_offset"]) and offsets is not None,
        )


def _merged_lookups(gm: GraphModule, join: Node, modules: dict[str, Any], seen: _Seen) -> int:
    """Let lookups next to each other in ``join`` be one op."""
    stacked = _joined(join, _STACKS, seen)
    parts = stacked or _joined(join, _JOINS, seen)
    if parts is None:
        return 0
    found = 0
    result: list[Node] = []
    for run in _runs(parts, modules, seen):
        if len(run) < 2 or isinstance(run[0], Node):
            result += [one if isinstance(one, Node) else one.node for one in run]
            continue
        found += 1
        with gm.graph.inserting_before(join):
            merged = _merged(gm, run)
            if stacked is not None:
                size = seen.sizes[run[0].node][1]
                merged = gm.graph.call_method("reshape", (merged, -1, len(run), size))
        result.append(merged)
    if not found:
        return 0
    with gm.graph.inserting_before(join):
        if stacked is not None:
            result = [
                x if x.target == "reshape" else gm.graph.call_function(torch.unsqueeze, (x, 1))
                for x in result
            ]
        new = result[0]
        if len(result) > 1:
            new = gm.graph.call_function(torch.cat, (result, 1))
            new.meta.update(join.meta)
    join.replace_all_uses_with(new)
    gm.graph.erase_node(join)
    return found


def _runs(parts: list[Node], modules: dict[str, Any], seen: _Seen) -> Iterator[list[Any]]:
    """``parts`` in order: lists of lookups that go together, and of single other nodes."""
    run: list[Any] = []
    for part in parts:
        one = _lookup(part, modules, seen)
        if run and (one is None or run[0].form != one.form):
            yield run
            run = []
        if one is None:
            yield [part]
        else:
            run.append(one)
    if run:
        yield run


def _lookup(node: Node, modules: dict[str, Any], seen: _Seen) -> _Lookup | None:
    if node.op == "call_module":
        module = modules[str(node.target)]
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        return _Lookup.of_module(node, module, seen) if is_table else None
    call = own_call(node)
    if call is None or call[0] not in _LOOKUPS:
        return None
    return _Lookup.of_op(node, call[1], seen)


def _converted(node: Any, seen: _Seen) -> Any:
    """``node``, or what it was made of where its type was that already."""
    while isinstance(node, Node) and node.op == "call_method" and node.target in _CONVERSIONS:
        source = node.args[0]
        if not isinstance(source, Node) or seen.dtypes[source] != seen.dtypes[node]:
            break
        node = source
    return node


def _merged(gm: GraphModule, lookups: Sequence[_Lookup]) -> Node:
    node = gm.graph.call_function(
        torch.ops.x86quant.embedding_bags.default,
        (
            [
                add_constant(gm, gm.graph, f"{one.name}_rows", one.rows)
                if isinstance(one.rows, torch.Tensor)
                else one.rows
                for one in lookups
            ],
            [
                gm.graph.call_function(torch.unsqueeze, (one.indices, 1))
                if one.of_ids
                else one.indices
                for one in lookups
            ],
            [one.offsets for one in lookups if one.offsets is not None],
            [one.weights for one in lookups if one.weights is not None],
            [number for one in lookups for number in one.numbers],
            [one.name for one in lookups],
            lookups[0].last_offset,
        ),
    )
    node.meta["scope"] = lookups[0].node.meta.get("scope", "")
    return node
