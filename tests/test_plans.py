"""Plans for many shapes: sizes by rule, the cache of plans, choices that follow the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node

import x86quant
from tests.test_lowering import MODELS, stock
from x86quant.runtime import shapes

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


class _Recorder(Interpreter):
    """The sizes and strides that the ops themselves give."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.seen: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self.seen[n] = result
        return result


@pytest.mark.parametrize("name", MODELS)
def test_sizes_by_rule_are_those_of_the_ops(name: str) -> None:
    model, shape = MODELS[name][:2]
    torch.manual_seed(0)
    x = torch.randn(shape)
    gm = x86quant.compile(stock(model(), x), (x,)).graph_module
    recorder = _Recorder(gm)
    recorder.run(x)
    if any(node.op == "call_module" for node in gm.graph.nodes):
        return  # segments have none
    for node, found in shapes.infer_shapes(gm, (x,)).items():
        expected = recorder.seen[node]
        if isinstance(expected, torch.Tensor):
            assert found == expected.shape, node.format_node()
        elif node.op != "output" and isinstance(expected, int):
            assert found == expected, node.format_node()
