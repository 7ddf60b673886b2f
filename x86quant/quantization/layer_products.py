"""How many products each layer computes on calibration data: what it would cost in float."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node

from x86quant.calling.call import Call
from x86quant.calling.running import feed_parts, watched
from x86quant.quantization.prepared import PreparedModel
from x86quant.quantization.static.static_part import StaticPart, is_weighted


def products(prepared: PreparedModel) -> dict[str, int]:
    """The products of each layer in a call, of a few rows; sums and the like have none."""
    counts: dict[str, int] = {}
    call = (prepared.halves.calls or prepared.sample)[0]
    for part in prepared.parts:
        counter = _Counter(part)
        feed_parts(prepared.model, [call], {part: counter.observe})
        nodes = {layer.name: layer.node.name for layer in part.layers}
        for layer in prepared.layers.values():
            if layer.part is part:
                counts[layer.name] = counter.counts.get(nodes[layer.layer], 0)
    dynamic = [layer.name for layer in prepared.layers.values() if layer.part is None]
    modules = {name: prepared.model.get_submodule(name) for name in dynamic}

    def count(name: str, _: Call, result: Any) -> None:
        counts[name] = counts.get(name, 0) + _products(modules[name], result)

    if modules:
        with torch.no_grad(), watched(modules, after=count):
            call(prepared.model)
    return counts


def _products(module: nn.Module | None, result: Any) -> int:
    weight = getattr(module, "weight", None)
    if not isinstance(result, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return 0
    return result.numel() * weight[0].numel() if weight.dim() > 1 else 0


class _Counter(Interpreter):
    def __init__(self, part: StaticPart) -> None:
        super().__init__(part.prepared, graph=part.float_graph)
        self._part = part
        self.counts: dict[str, int] = {}

    def observe(self, call: Call) -> None:
        self.run(*call.args)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        module = self._part.module(self._part.nodes[n.name]) if n.op == "call_module" else None
        if is_weighted(module):
            self.counts[n.name] = self.counts.get(n.name, 0) + _products(module, value)
        return value
