"""Int8 as float arithmetic sees it: rounding weights and activations, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node

from x86quant.quantization.batches import Call
from x86quant.quantization.running import hand_over_hooks
from x86quant.quantization.static_part import StaticPart, is_weighted


def fake_activation(observer: Any, x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded and clipped the way ``observer`` says."""
    scale, zero_point = observer.calculate_qparams()
    low, high = int(observer.quant_min), int(observer.quant_max)
    return torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero_point), low, high)


def fake_weight(weight: torch.Tensor, observer: Any) -> torch.Tensor:
    """``weight`` rounded the way the weight ``observer`` says."""
    observer(weight)
    scale, zero_point = observer.calculate_qparams()
    low, high = int(observer.quant_min), int(observer.quant_max)
    if observer.ch_axis is None:
        return torch.fake_quantize_per_tensor_affine(
            weight, float(scale), int(zero_point), low, high
        )
    return torch.fake_quantize_per_channel_affine(
        weight, scale.float(), zero_point.int(), observer.ch_axis, low, high
    )


def rounded_copy(part: StaticPart, node: Node) -> nn.Module:
    """The layer that ``node`` calls, without what is fused behind it, with a rounded weight."""
    layer = copy.deepcopy(part.module(node))
    assert layer is not None
    observer = part.weight_observer(node, layer)
    with torch.no_grad():
        layer.weight.copy_(fake_weight(layer.weight.detach(), observer))  # type: ignore
    return layer


class SimulatedPart(nn.Module):
    """A part in float, except that some layers compute as if they were int8."""

    def __init__(self, part: StaticPart, layers: Collection[str], original: nn.Module) -> None:
        super().__init__()
        self._part = part
        self._run = _Simulation(part, {x.node.name for x in part.layers if x.name in layers})
        self.__dict__["_original"] = original
        hand_over_hooks(original, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The part's result."""
        call = self._part.inputs(Call(args, kwargs))
        if call is None:
            return self.__dict__["_original"].forward(*args, **kwargs)
        with torch.no_grad():
            return self._part.traced.results.fill(self._run.run(*call.args))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


class _Simulation(Interpreter):
    def __init__(self, part: StaticPart, on: set[str]) -> None:
        super().__init__(part.float_form())
        self._part, self._on = part, on
        self._rounded: dict[str, nn.Module] = {}
        self._nodes = {node.name: node for node in part.prepared.graph.nodes}

    def run_node(self, n: Node) -> Any:
        if n.name not in self._on:
            return super().run_node(n)
        node = self._nodes[n.name]
        observer = self._part.output_observer(node)
        assert observer is not None
        return fake_activation(observer, self._compute(n, node))

    def _compute(self, n: Node, node: Node) -> Any:
        """The value of a layer whose input and weight are rounded."""
        if not is_weighted(self._part.module(node)):
            return super().run_node(n)
        x = self.env[n.all_input_nodes[0]]
        before = self._part.observer_of(node.args[0])
        if before is not None:
            x = fake_activation(before, x)
        if n.name not in self._rounded:
            self._rounded[n.name] = rounded_copy(self._part, node)
        y = self._rounded[n.name](x)
        fused = self.fetch_attr(str(n.target))
        for follower in list(fused.children())[1:] if self._part.is_fused(node) else ():
            y = follower(y)
        return y
