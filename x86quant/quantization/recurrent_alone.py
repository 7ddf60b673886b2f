"""The recurrent layers of a model by themselves, in static int8: all of it takes longer than they.

Ranges cost most of the time of making a static model, and change nothing about how fast it is. So
layers with any range tell, in a part of a second, that there is nothing to be gained.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from x86quant.calling.call import Call
from x86quant.calling.running import feed
from x86quant.calling.state import state_kept
from x86quant.compiled.compiler import build
from x86quant.dynamic import is_recurrent
from x86quant.lowering.rounded import rounded
from x86quant.quantization.static.conversion import (
    rounded_products,
    rounded_recurrent,
    weight_observer,
)
from x86quant.quantization.static.static_part import Ranges
from x86quant.quantization.tracing.recurrent_layers import is_recurrent_layer, part_recurrent

#: Scale and zero point of states, which lie between -1 and 1; inputs may have any.
_QPARAMS = (1 / 128, 128)


class RecurrentAlone(nn.Module):
    """Runs recurrent layers on what they were given in one call, whatever it is called with."""

    def __init__(self, runs: list[tuple[nn.Module, torch.Tensor]]) -> None:
        super().__init__()
        self._runs = runs

    def forward(self, *_: Any, **__: Any) -> None:
        """Run them."""
        for layers, x in self._runs:
            layers(x)


def recurrent_alone(model: nn.Module, call: Call) -> RecurrentAlone | None:
    """The recurrent layers of ``model`` on what ``call`` gives them; None if it is not plain.

    Cells are not: in a static graph they are steps of one program, here each would be its own.
    """
    modules = {name: m for name, m in model.named_modules() if is_recurrent(m)}
    given: dict[str, list[Call]] = {name: [] for name in modules}
    with state_kept(model):
        feed(model, [call], {name: kept.append for name, kept in given.items()})
    runs: list[tuple[nn.Module, torch.Tensor]] = []
    for name, kept in given.items():
        for one in kept:
            x = one.args[0] if one.args else None
            if isinstance(modules[name], nn.RNNCellBase) or not isinstance(x, torch.Tensor):
                return None
            layers = _in_static_int8(modules[name])
            if layers is None:
                return None
            runs.append((build(layers, (x,), writes=False), x.clone()))
    return RecurrentAlone(runs) if runs else None


def _in_static_int8(module: nn.Module) -> GraphModule | None:
    """The layers of ``module``, whose states begin as zeros, as one graph."""
    graph, root = Graph(), nn.Module()
    root.layers = module
    x = graph.placeholder("x")
    pair = graph.call_module("layers", (graph.call_function(rounded, (x, *_QPARAMS)),))
    graph.output(graph.call_function(operator.getitem, (pair, 0)))
    gm = GraphModule(root, graph)
    if not part_recurrent(gm):
        return None
    weights = functools.partial(weight_observer, Ranges().weight_kind())
    for node in gm.graph.nodes:
        layer = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
        if is_recurrent_layer(layer):
            products = rounded_products(node, layer, weights)
            int8 = rounded_recurrent(layer, products, _QPARAMS, _QPARAMS)
            gm.set_submodule(str(node.target), int8)
    gm.recompile()
    return gm
