"""That every graph is looked at after each pass: ``every_pass_keeps_the_graph_valid``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from x86quant.errors import UnsupportedError
from x86quant.lowering.graph_tools import attribute
from x86quant.lowering.passes import run_passes
from x86quant.quantization.entry import quantize


def _no_zero_point(gm: GraphModule) -> int:
    for node in gm.graph.nodes:
        if "out_zp" in node.kwargs:
            node.kwargs = {**node.kwargs, "out_zp": 300}
    return 0


def _of_another_type(gm: GraphModule) -> int:
    for node in gm.graph.nodes:
        if "out_zp" in node.kwargs:
            node.kwargs = {**node.kwargs, "out_zp": float(node.kwargs["out_zp"])}
    return 0


def _another_tensor(gm: GraphModule) -> int:
    for name in [name for name, _ in gm.named_buffers() if "scales" in name]:
        setattr(gm, name, -attribute(gm, name))
    return 0


def _the_same_tensor(gm: GraphModule) -> int:
    for name, scales in gm.named_buffers():
        if "scales" in name:
            scales.neg_()
    return 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_zero_point, "a zero point is in 0..255"),
        (_of_another_type, "out_zp must be int"),
        (_another_tensor, "hold negative numbers"),
        (_the_same_tensor, "hold negative numbers"),
    ],
)
def test_a_pass_that_spoils_a_graph_is_seen(spoil: Callable[[GraphModule], int], said: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    made = quantize(net, [torch.randn(4, 3, 8, 8)], progress=False)
    graph = made.graph_module
    assert isinstance(graph, GraphModule)
    run_passes(graph)
    with pytest.raises(UnsupportedError, match=said):
        run_passes(graph, (spoil,))
