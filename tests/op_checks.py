"""Compare what runs natively with the plain torch ops, one op at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from x86quant.lowering.graph_tools import attribute, is_op, label, op_name
from x86quant.runtime.partition import partition
from x86quant.runtime.segment import Segment


@dataclasses.dataclass(frozen=True, slots=True)
class OpCheck:
    """How the native form of one op compares with the plain one, on the same inputs.

    Attributes:
        name: the node.
        op: its op.
        layer: the layer it stands for.
        kernel: what ran it.
        steps: the largest difference of codes; behind a table, in units of the largest jump
            between neighbours; of a float result, in units of 1e-5 of its range.
        different: the fraction of codes that differ at all.
    """

    name: str
    op: str
    layer: str
    kernel: str
    steps: float
    different: float

    def __str__(self) -> str:
        return (
            f"{self.layer} ({self.op}, {self.kernel}): {self.steps:g} steps, "
            f"{self.different:.4%} of the codes differ"
        )


def check_ops(graph_module: GraphModule, inputs: Sequence[Any]) -> list[OpCheck]:
    """Run ``graph_module`` on ``inputs`` in plain torch, and each op natively beside it."""
    comparer = _NativeComparer(graph_module)
    with torch.no_grad():
        comparer.run(*inputs)
    return comparer.checks


class _NativeComparer(Interpreter):
    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.checks: list[OpCheck] = []

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if is_op(n) and value.numel():
            self._check(n, value)
        return value

    def _check(self, node: Node, expected: torch.Tensor) -> None:
        alone = partition(_alone(self.module, node), Segment)
        segments = [module for module in alone.children() if isinstance(module, Segment)]
        if not segments:
            return  # torch runs it
        sources = [n for n in node.all_input_nodes if n.op != "get_attr"]
        actual = alone(*(self.env[source] for source in sources))
        step = segments[0].plans[0].steps[-1]
        difference = (actual.double() - expected.double()).abs()
        if expected.is_floating_point():
            difference /= expected.abs().max().clamp(min=1e-30) * 1e-5
        elif node.kwargs.get("lut") is not None:
            difference /= self._largest_jump(node)
        self.checks.append(
            OpCheck(
                node.name,
                op_name(node),
                label(node),
                step.kernel,
                steps=float(difference.max()),
                different=float((difference > 0).double().mean()),
            )
        )

    def _largest_jump(self, node: Node) -> float:
        """How far apart the results of neighbouring codes are, at most and at least 1."""
        table = attribute(self.module, str(cast(Node, node.kwargs["lut"]).target)).double()
        return max(1.0, float(table.diff().abs().max()))


def _alone(root: torch.nn.Module, node: Node) -> GraphModule:
    """A graph of nothing but ``node``."""
    graph = Graph()
    values: dict[Node, Node] = {}
    for source in node.all_input_nodes:
        copied = graph.placeholder(source.name) if source.op != "get_attr" else None
        values[source] = copied or graph.node_copy(source)
    graph.output(graph.node_copy(node, values.__getitem__))
    return GraphModule(root, graph)
