"""Rows that nobody sees are not computed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from x86quant.lowering.graph_tools import emit, finish, is_op, nodes_of
from x86quant.lowering.row_passes._values import emit_many, is_float32, items, sizes, value_of

aten = torch.ops.aten


#: Ops that make a row of a result of the same row of each of these arguments, where they have them.
_BY_ROW = (
    "gated_rows_rows", "linear_rows", "linear_rows_norm", "linear_rows_rows", "norm_rows",
    "quantize_rows", "reorder_codes",
)  # fmt: skip
_ROWS = ("x", "residual", "codes", "scale", "zero_point", "q", "k", "v")


#: In ``meta`` of a graph: nobody reads rows of its results that are hidden.
PADDING_UNREAD = "padding_unread"


class _Mask(NamedTuple):
    """Which tokens may be seen.

    Attributes:
        tokens: bool [B, T].
        numbers: what that is made of, if it is: 0 where a token is hidden.
    """

    tokens: Node
    numbers: Node | None


def leave_out_padding(gm: GraphModule) -> int:
    """With a padding mask, rows of hidden tokens are computed only where a result may show them.

    Between its embeddings and its results an encoder computes each token's row by itself, but for
    attention; and that reads of other tokens what the mask lets it see. So where all attentions
    share one mask of tokens, the others' rows change nothing of those that are seen, and are left
    out: rows are gathered in front and put back behind, with zeros for the others. That is done
    only if every result takes the same values then: whatever reads rows behind the last layer must
    hide those that are masked itself (a mean over tokens, say), or read the first token alone.
    Results that are rows hold zeros for hidden tokens, if whoever takes them is known not to read
    them.

    Returns the number of attentions without padding.
    """
    attentions = [*nodes_of(gm, "attention_rows")]
    masks = {_mask(node.kwargs["mask"]) for node in attentions}
    if len(masks) != 1 or [*nodes_of(gm, "attention", "cached_attention")]:
        return 0
    (mask,) = masks
    if mask is None:
        return 0
    rows = _Rows(mask, attentions, unread=bool(gm.meta.get(PADDING_UNREAD)))
    if not rows.grow() or not rows.can_leave_out():
        return 0
    rows.rewrite(gm)
    return finish(gm, len(attentions))


class _Rows:
    """The nodes of a graph that compute rows of tokens, [B, T, ...], each by itself.

    Attributes:
        inside: those nodes, attentions among them.
        entries: what they read of other nodes: rows of floats.
    """

    def __init__(self, mask: _Mask, attentions: list[Node], *, unread: bool) -> None:
        self._mask, self._unread = mask, unread
        self._attentions = attentions
        self._sizes = sizes(mask.tokens)
        self.inside: dict[Node, None] = {}
        self.entries: dict[Node, None] = {}
        self._first = False

    def grow(self) -> bool:
        """Gather all nodes around the attentions; whether nothing but rows of floats goes in."""
        waiting = [*self._attentions]
        while waiting:
            node = waiting.pop()
            if node in self.inside:
                continue
            self.inside[node] = None
            waiting += [n for n in _rows_read(node) if self._is_by_row(n)]
            waiting += [n for n in node.users if self._is_by_row(n)]
        read = (n for node in self.inside for n in _rows_read(node))
        self.entries = dict.fromkeys(n for n in read if n not in self.inside)
        return all(is_float32(n) and self._is_rows(n) for n in self.entries)

    def can_leave_out(self) -> bool:
        """Whether every result is the same if rows of hidden tokens are zeros."""
        for node in self.inside:
            for user in self._readers(node):
                if not (is_float32(node) and self._is_rows(node)):
                    return False
                if _is_first(user, node):
                    self._first = True
                elif not (self._hides(user, node) or (self._unread and user.op == "output")):
                    return False
        return not _depend_on([self._mask.tokens, *self.entries], self.inside)

    def rewrite(self, gm: GraphModule) -> None:
        """Gather what goes in, and put back what comes out."""
        begin = next(n for n in gm.graph.nodes if n in self.inside)
        _move_before(begin, [self._mask.tokens, *self.entries])
        mask = self._mask.tokens
        with gm.graph.inserting_before(begin):
            _, places, starts, seen = emit_many(
                gm.graph, "present_tokens", mask, (None,) * 3, mask=mask, first=self._first
            )
            told = {"places": places, "starts": starts}
            gathered = {n: emit(gm.graph, "gather_tokens", n, x=n, **told) for n in self.entries}
        for old, new in gathered.items():
            new.meta["val"] = value_of(old)
            old.replace_all_uses_with(new, lambda user: user in self.inside)
        for node in [*self.inside]:
            readers = self._readers(node)
            if readers:
                with gm.graph.inserting_after(node):
                    back = emit(gm.graph, "scatter_tokens", node, x=node, **told)
                back.meta["val"] = value_of(node)
                for user in readers:
                    user.replace_input_with(node, back)
        for node in self._attentions:
            self._among_present(gm, node, starts, seen)

    def _among_present(self, gm: GraphModule, node: Node, starts: Node, seen: Node) -> None:
        given = {k: v for k, v in node.kwargs.items() if k != "mask"}
        with gm.graph.inserting_before(node):
            _, *results = emit_many(
                gm.graph,
                "present_attention_rows",
                node,
                (None,) * 3,
                **given,
                starts=starts,
                seen=seen,
            )
        for number, item in items(node).items():
            item.replace_all_uses_with(results[number])
            gm.graph.erase_node(item)
        gm.graph.erase_node(node)

    def _readers(self, node: Node) -> list[Node]:
        """Who reads values of ``node`` outside."""
        return [n for n in node.users if n not in self.inside and n.target is not aten.sym_size.int]

    def _is_rows(self, node: Node) -> bool:
        found = sizes(node)
        return found is not None and len(found) == 3 and found[:2] == self._sizes

    def _is_by_row(self, node: Node) -> bool:
        """Whether ``node`` computes rows of tokens, each of the same rows."""
        if is_op(node, *_BY_ROW):
            return True
        if node.target is operator.getitem:
            return is_op(node.args[0], *_BY_ROW, "attention_rows")
        found = sizes(node) or ()
        if len(found) < 3 or found[:2] != self._sizes:
            return False
        if node.target is aten.slice.Tensor:
            return node.args[1] in (-1, len(found) - 1)
        if node.target is not aten.reshape.default:
            return False
        return (sizes(node.args[0]) or ())[:2] == self._sizes

    def _hides(self, user: Node, rows: Node) -> bool:
        """Whether ``user`` gives the same whatever numbers the hidden of ``rows`` are."""
        if user.target is aten.mul.Tensor:
            others = [x for x in user.args if x is not rows]
            return len(others) == 1 and self._is_masked(others[0], None)
        if user.target in (aten.where.self, aten.where.ScalarOther):
            return (
                user.args[1] is rows
                and user.args[2] is not rows
                and self._is_masked(user.args[0], torch.bool)
            )
        if user.target is aten.masked_fill.Scalar:
            hidden = user.args[1]
            return _is_not(hidden) and self._is_masked(hidden.args[0], None)  # type: ignore[union-attr]
        return False

    def _is_masked(self, node: Any, dtype: torch.dtype | None) -> bool:
        """Whether ``node``, of [B, T, 1 or N], is 0 or false wherever a token is hidden."""
        value, found = value_of(node), sizes(node)
        if value is None or found is None or len(found) != 3 or found[:2] != self._sizes:
            return False
        if dtype is not None and value.dtype is not dtype:
            return False
        while isinstance(node, Node) and node not in (self._mask.tokens, self._mask.numbers):
            rank = len(sizes(node) or ())
            spread = node.target is aten.unsqueeze.default and node.args[1] in (-1, rank - 1)
            if not (spread or node.target in (aten.expand.default, aten._to_copy.default)):
                return False
            node = node.args[0]
        return isinstance(node, Node)


def _rows_read(node: Node) -> list[Node]:
    """The values of which ``node`` reads rows."""
    if is_op(node):
        found = [node.kwargs.get(name) for name in _ROWS]
        return [n for n in found if isinstance(n, Node)]
    return [node.args[0]] if isinstance(node.args[0], Node) else []


def _mask(node: Any) -> _Mask | None:
    """The tokens that ``node``, the mask of an attention, lets every query see."""
    while isinstance(node, Node) and node.target is aten.expand.default:
        source, found = sizes(node.args[0]), sizes(node)
        if source is None or found is None or len(source) != len(found):
            return None
        node = node.args[0]
    found = sizes(node)
    if found is None or len(found) != 4 or found[1:3] != ("1", "1"):
        return None
    while isinstance(node, Node) and node.target in (aten.reshape.default, aten.unsqueeze.default):
        seen = sizes(node.args[0])
        if seen is None or (found[0], found[3]) != (seen[0], seen[-1]):
            return None
        node = node.args[0]
    value = value_of(node)
    if value is None or value.dim() != 2 or value.dtype is not torch.bool:
        return None
    return _Mask(node, _numbers(node))


def _numbers(tokens: Node) -> Node | None:
    """What ``tokens`` are made of, if they are the numbers that are not 0."""
    converts = tokens.target is aten._to_copy.default
    compares = tokens.target is aten.ne.Scalar and tokens.args[1] == 0
    source = tokens.args[0] if converts or compares else None
    return source if isinstance(source, Node) and sizes(source) == sizes(tokens) else None


def _is_first(user: Node, rows: Node) -> bool:
    """Whether ``user`` looks at the first token of each sentence."""
    if user.args[:1] != (rows,) or len(user.args) < 3 or user.args[1] not in (1, -2):
        return False
    if user.target is aten.select.int:
        return bool(user.args[2] == 0)
    return user.target is aten.slice.Tensor and user.args[2:] == (0, 1)


def _is_not(node: Any) -> bool:
    """Whether ``node`` is true where its first argument is 0 or false."""
    if not isinstance(node, Node):
        return False
    if node.target is aten.eq.Scalar:
        return bool(node.args[1] == 0)
    return node.target in (aten.logical_not.default, aten.bitwise_not.default)


def _depend_on(nodes: Iterable[Node], others: Collection[Node]) -> bool:
    """Whether one of ``nodes`` is computed of one of ``others``."""
    return any(node in others for node in _behind(nodes))


def _behind(nodes: Iterable[Node]) -> set[Node]:
    """``nodes`` and all that they are computed of."""
    found: set[Node] = set()
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _move_before(begin: Node, nodes: Iterable[Node]) -> None:
    """Let all that ``nodes`` are computed of come before ``begin``, in their order."""
    needed = _behind(nodes)
    late = []
    node = begin
    while node.op != "root":
        if node in needed:
            late.append(node)
        node = node.next
    for node in late:
        begin.prepend(node)
