"""The shape of every value of a segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from x86quant.lowering.graph_tools import attribute, is_op, op_called
from x86quant.runtime import layout
from x86quant.runtime.native_form import KnownSizes, NativeForm
from x86quant.runtime.native_forms import FORMS


def infer_shapes(graph_module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """A ``torch.Size`` for a tensor, the value itself for anything else.

    Raises:
        RuntimeError, ValueError, IndexError: an op of the graph cannot take what it gets.
    """
    return _Shapes(graph_module).of_all(inputs)


def is_empty(shape: Any) -> bool:
    """Whether this is the size of a tensor without elements."""
    return isinstance(shape, torch.Size) and shape.numel() == 0


def counts_in_nothing(node: Node, shapes: Mapping[Node, Any]) -> bool:
    """Whether an empty value is read by what is empty too and by concatenations alone.

    An input may be asked for its sizes, too.
    """
    asked = {u for u in node.users if u in shapes and not isinstance(shapes[u], torch.Size)}
    if asked and node.op != "placeholder":
        return False
    read = node.users.keys() - asked
    return all(is_empty(shapes.get(user)) or is_op(user, "cat") for user in read)


class _Shapes(KnownSizes):
    """Walks the graph with sizes; with tensors without data where torch's own calls need them.

    Running an op of ours on tensors without data takes a thousand times as long as its rule.
    """

    def of_all(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        given = iter(inputs)
        for node in self.root.graph.nodes:
            if node.op == "placeholder":
                self._set(node, next(given))
            elif node.op not in ("get_attr", "output"):
                self._call(node)
        return self.values

    def _set(self, node: Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.dtypes[node] = value.dtype
            self.values[node] = value.shape
        else:  # a torch.Size here is the shape of a tensor, not a value that happens to be one
            self.values[node] = tuple(value) if isinstance(value, torch.Size) else value

    def _call(self, node: Node) -> None:
        form = FORMS.get(op_called(node) or "")
        if form is not None and self._by_rule(node, form):
            return
        args = map_arg(node.args, self._meta)
        kwargs = map_arg(node.kwargs, self._meta)
        if node.op == "call_method":
            self._set(node, getattr(args[0], str(node.target))(*args[1:], **kwargs))
        else:
            self._set(node, node.target(*args, **kwargs))  # type: ignore[operator]

    def _by_rule(self, node: Node, form: NativeForm) -> bool:
        """False where the op itself should say, or complain."""
        if form.reads is not None:
            for n in node.all_input_nodes:
                is_tensor = isinstance(self.values.get(n), torch.Size)
                if is_tensor and self.dtypes.get(n) is not form.reads:
                    return False
        if form.results is not None:
            results = form.results(self, node.kwargs)
            self.values[node] = results
            return results is not None
        size = form.sizes(self, node.kwargs)
        if size is not None:
            self.values[node] = torch.Size(size)
            self.dtypes[node] = form.gives
        return size is not None

    def _meta(self, node: Node) -> Any:
        """A tensor without data as ops of ours return it, or the value itself."""
        if node.op == "get_attr":
            tensor: torch.Tensor = attribute(self.root, str(node.target))
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        size = self.values[node]
        if isinstance(size, torch.Size):
            rank = len(size)
            order = layout.channels_last_order(rank) if rank in (4, 5) else range(rank)
            return layout.like(size, order, self.dtypes[node])
        return size
