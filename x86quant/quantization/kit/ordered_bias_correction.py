"""Bias correction layer by layer: each layer gets what the layers before it, corrected, make.

The mean of every output channel is brought to the float model's, errors that pile up among them.
All batches go through the graph side by side, so one run as in int8 is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.fx import Node

from x86quant.calling.call import Call
from x86quant.calling.float_convolutions import native_float_convolutions
from x86quant.quantization.kit.channel_sums import Sums, channel_sums
from x86quant.quantization.kit.simulation import Simulation, rounded_copy
from x86quant.quantization.static.static_part import StaticPart, is_weighted

#: Batches go side by side: their inputs may have so many bytes, values between many times more.
_MOST_BYTES = 32 << 20


def corrections_in_order(
    part: StaticPart, calls: Sequence[Call], exact: Mapping[str, Sequence[Sums]]
) -> dict[str, torch.Tensor]:
    """What to subtract from the bias of each layer of a calibrated ``part``, by path.

    ``exact`` are the sums of channels in float, by path of the layer, for each of ``calls``.
    ``part.corrections`` are those found so far while this runs, and all of them afterwards.
    """
    part.corrections = {}
    runs = [_SideBySide(part, call) for call in _few(calls)]
    nodes = list(part.float_graph.nodes)
    times = Counter(node.target for node in nodes if node.op == "call_module")
    layers = {layer.node.name for layer in part.layers}
    last = {source: node for node in nodes for source in node.all_input_nodes}
    with torch.no_grad(), native_float_convolutions():
        for node in nodes[:-1]:  # the last is the output
            module = part.module(part.nodes[node.name]) if node.op == "call_module" else None
            if node.name in layers and is_weighted(module) and times[node.target] == 1:
                assert module is not None
                rounded = rounded_copy(part, part.nodes[node.name])
                path = str(node.target)
                part.corrections[path] = _mean_error(runs, node, exact[path], rounded)
            for run in runs:
                run.step(node)
            for source in node.all_input_nodes:
                if last[source] is node:
                    for run in runs:
                        run.forget(source)
    return part.corrections


class _SideBySide(Simulation):
    """One call as in int8, node by node."""

    def __init__(self, part: StaticPart, call: Call) -> None:
        super().__init__(part, {layer.node.name for layer in part.layers}, None)
        self.env, self.args_iter = {}, iter(call.args)

    def step(self, node: Node) -> None:
        self.env[node] = self.run_node(node)

    def forget(self, node: Node) -> None:
        self.env.pop(node, None)


def _mean_error(
    runs: Sequence[_SideBySide], node: Node, exact: Sequence[Sums], rounded: nn.Module
) -> torch.Tensor:
    """How far the mean of each channel of the layer that ``node`` calls is off."""
    total, values = torch.zeros((), dtype=torch.float64), 0
    for run, (expected, count) in zip(runs, exact, strict=False):  # of more calls than fit
        actual, _ = channel_sums(rounded, run.rounded_input(node))
        total = total + (actual.double() - expected.double())
        values += count
    return (total / max(values, 1)).float()


def _few(calls: Sequence[Call]) -> list[Call]:
    """The first of ``calls``, as many as fit in memory together."""
    found: list[Call] = []
    size = 0
    for call in calls:
        size += sum(x.numel() * x.element_size() for x in call.leaves)
        if found and size > _MOST_BYTES:
            break
        found.append(call)
    return found
