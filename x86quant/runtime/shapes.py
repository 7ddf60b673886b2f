"""The shape of every value of a segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from x86quant.lowering.graph_tools import attribute


def infer_shapes(graph_module: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """A ``torch.Size`` for a tensor, the value itself for anything else."""
    interpreter = _Shapes(graph_module)
    metas = [
        torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x
        for x in inputs
    ]
    interpreter.run(*metas)
    return interpreter.shapes


class _Shapes(Interpreter):
    """Runs the graph on tensors without data."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.shapes: dict[Node, Any] = {}
        self.root = graph_module

    def run_node(self, node: Node) -> Any:
        if node.op == "get_attr":
            tensor = attribute(self.root, str(node.target))
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        result = super().run_node(node)
        if isinstance(result, torch.Tensor):
            self.shapes[node] = result.shape
        else:  # a torch.Size here is the shape of a tensor, not a value that happens to be one
            self.shapes[node] = tuple(result) if isinstance(result, torch.Size) else result
        return result
