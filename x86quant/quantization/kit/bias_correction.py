"""Bias correction: what rounding adds to a channel on average is taken off its bias.

Each layer is given the float model's own inputs, rounded as they will be, so errors of layers
before it do not pile up; the mean difference of each output channel is its correction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from x86quant.quantization.kit.channel_sums import Given, Sums, channel_sums
from x86quant.quantization.kit.simulation import fake_activation, rounded_copy
from x86quant.quantization.static.static_part import StaticPart, is_weighted


class BiasCorrection:
    """Measures the corrections of a calibrated part while it is run in float.

    Attributes:
        exact: what the channels of each layer are in float, by path, for each batch.
    """

    def __init__(self, part: StaticPart) -> None:
        nodes = [layer.node for layer in part.layers if is_weighted(part.module(layer.node))]
        # A layer used again and again meets its own errors, which one mean does not describe.
        calls = Counter(
            node.target for node in part.prepared.graph.nodes if node.op == "call_module"
        )
        self._part = part
        self._nodes = {node.name: node for node in nodes if calls[node.target] == 1}
        self._given = {name: Given() for name in self._nodes}
        self.exact: dict[str, list[Sums]] = {str(n.target): [] for n in self._nodes.values()}

    def take(self, node: Node, given: Sequence[Any], _: Any) -> None:
        """Look at what the layer of ``node`` is given in float."""
        layer = self._part.module(node)
        if node.name not in self._nodes or layer is None:
            return
        x = given[0]
        observer = self._part.observer_of(node.args[0])
        self._given[node.name].add(layer, x if observer is None else fake_activation(observer, x))
        self.exact[str(node.target)].append(channel_sums(layer, x))

    def corrections(self) -> dict[str, torch.Tensor]:
        """What to subtract from the bias of each layer, by path, with the weights it has now."""
        found: dict[str, torch.Tensor] = {}
        for name, node in self._nodes.items():
            exact = self.exact[str(node.target)]
            actual, count = self._given[name].sums(rounded_copy(self._part, node))
            if count:
                expected = torch.stack([total for total, some in exact if some]).sum(0)
                found[str(node.target)] = ((actual - expected) / count).float()
        return found
