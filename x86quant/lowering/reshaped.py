"""Steps that give a tensor another shape in place, as steps that return a tensor of that shape.

``x.unsqueeze_(0)`` changes only how x looks at its memory: what reads x from then on reads that
view. ``torch.sum(y, 0, out=x)`` gives x the shape of the sum: what reads x from then on reads the
sum, where nothing else reads the memory of x.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from x86quant.errors import UnsupportedError
from x86quant.lowering.functional_forms import NodeCall, functional_forms, tried
from x86quant.lowering.tensor_memory import (
    Geometry,
    clones,
    geometry_of,
    is_fresh,
    same_values,
    storage_of,
    tensors_of,
)

_SEED = 0

#: Methods that change how a tensor looks at its memory, and not what is there.
_IN_PLACE_VIEWS = frozenset(
    ["squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"]
)


def without_reshapes(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """``gm`` itself if no node changes the shape of another's value, else a graph that gives the
    same results. What else is written in place still is.

    It draws from torch's own generator.

    Raises:
        UnsupportedError: such a change cannot be expressed.
    """
    if not any(map(_may_reshape, gm.graph.nodes)):
        return gm
    torch.default_generator.manual_seed(_SEED)
    recorder = _ShapeRecorder(gm)
    expected = clones(recorder.run(*clones(tuple(example_inputs))))
    if not recorder.reshapes:
        return gm
    new = copy.copy(gm)
    new.graph = _rewritten(gm, recorder)
    torch.default_generator.manual_seed(_SEED)
    if not same_values(expected, Interpreter(new).run(*clones(tuple(example_inputs)))):
        raise UnsupportedError("a tensor whose shape changes in place is read in another way")
    return new


def _may_reshape(n: Node) -> bool:
    if isinstance(n.target, torch._ops.OpOverload):
        return torch.Tag.inplace_view in n.target.tags
    return (n.op == "call_method" and n.target in _IN_PLACE_VIEWS) or "out" in n.kwargs


@dataclasses.dataclass(frozen=True, slots=True)
class _Reshape:
    """A tensor that a node gave another shape, and how to compute what it is then."""

    tensor: torch.Tensor
    call: NodeCall
    is_view: bool


class _ShapeRecorder(Interpreter):
    """Runs a graph and notes the value of every node, and which of them got another shape."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.reshapes: dict[Node, _Reshape] = {}
        #: The memory of each node's tensors when it was made.
        self.storages: dict[Node, set[int]] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The attribute, or if it is a tensor a copy: nothing may change the model."""
        value = super().get_attr(target, args, kwargs)
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    def run_node(self, n: Node) -> Any:
        if not _may_reshape(n):
            value = super().run_node(n)
        else:
            given = tensors_of([self.env[argument] for argument in n.all_input_nodes])
            before = [geometry_of(x) for x in given]
            forms = [(call, tried(call, self.env)) for call in functional_forms(n, self.module)]
            value = super().run_node(n)
            self._note(n, given, before, forms)
        self.storages[n] = set(map(storage_of, tensors_of(value)))
        return value

    def _note(
        self,
        n: Node,
        given: list[torch.Tensor],
        before: list[Geometry],
        forms: list[tuple[NodeCall, Any]],
    ) -> None:
        pairs = zip(given, before, strict=True)
        changed = {id(x): x for x, geometry in pairs if geometry_of(x) != geometry}
        if not changed:
            return
        same = [call for call, value in forms if len(changed) == 1
                and same_values(next(iter(changed.values())), value)]  # fmt: skip
        if not same:
            raise UnsupportedError(
                f"{n.target} changes the shape of a tensor in place; write x = x."
                f"{str(n.target).rstrip('_')}(...) instead"
            )
        (tensor,) = changed.values()
        self.reshapes[n] = _Reshape(tensor, same[0], "out" not in n.kwargs)


def _rewritten(gm: GraphModule, recorder: _ShapeRecorder) -> Graph:
    graph = Graph()
    now: dict[Node, Node] = {}
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.nodes:
        reshape = recorder.reshapes.get(node)
        if reshape is None:
            now[node] = graph.node_copy(node, now.__getitem__)
            continue
        later = [n for n in now if any(position[user] > position[node] for user in n.users)]
        same = [n for n in now if recorder.env[n] is reshape.tensor]
        _check_alone(node, same, later, recorder)
        op, target, args, kwargs = reshape.call
        new_args: Any = map_arg(args, now.__getitem__)
        new_kwargs: Any = map_arg(kwargs, now.__getitem__)
        new = graph.create_node(op, target, new_args, new_kwargs, name=node.name)
        new.meta.update(node.meta)
        now.update(dict.fromkeys([*same, node], new))
    return graph


def _check_alone(node: Node, same: list[Node], later: list[Node], recorder: _ShapeRecorder) -> None:
    """That nothing sees the change of ``node`` but what reads ``same``, which are its tensor.

    Raises:
        UnsupportedError: something does.
    """
    reshape = recorder.reshapes[node]
    if any(n.op == "get_attr" and not is_fresh(n) for n in same):
        raise UnsupportedError(f"the model changes the shape of its own tensor ({node.target})")
    for other in later:
        if other in same:
            continue
        value = recorder.env[other]
        holds = any(x is reshape.tensor for x in tensors_of(value))
        memory = set() if reshape.is_view else set().union(*map(recorder.storages.get, same))  # type: ignore[arg-type]
        if holds or recorder.storages[other] & memory:
            raise UnsupportedError(
                f"{node.target} changes the shape of a tensor whose memory {other.name} reads too"
            )
