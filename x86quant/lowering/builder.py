"""What a canonical graph is written with: float calls in one spelling, constants, int8 weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from x86quant.lowering import normalize
from x86quant.lowering.graph_tools import (
    add_constant,
    dequantized,
    emit,
    scale_and_zp,
    symmetric_int8,
)
from x86quant.lowering.rounded import Int8Weight


class Builder:
    """Writes a canonical graph call by call; converters use it (``float_forms``).

    Attributes:
        root: what holds the graph's constants and modules.
        graph: the graph so far.
    """

    def __init__(self) -> None:
        self.root = nn.Module()
        self.graph = Graph()
        self._shared: dict[str, str] = {}
        self._once: dict[int, tuple[str, torch.Tensor]] = {}  # kept, so that no other has its id

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Emit a float call in its canonical spelling; an identity emits nothing."""
        call = normalize.normalized(function, args, kwargs)
        if call is None:
            if not args and "input" in kwargs:  # passes look for it at the first place
                kwargs = dict(kwargs)
                args = (kwargs.pop("input"),)
            return self.graph.call_function(normalize.not_canonical(function), args, kwargs)
        target, arguments = call
        if target is normalize.IDENTITY:
            return arguments[0]
        keywords = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        positional = arguments[:-1] if keywords else arguments
        return self.graph.call_function(target, tuple(positional), dict(keywords))

    def constant(self, hint: str, tensor: torch.Tensor) -> Node:
        """A constant tensor of the graph."""
        return add_constant(self.root, self.graph, hint, tensor.detach())

    def constant_once(self, hint: str, tensor: torch.Tensor) -> Node:
        """A constant that every call with this ``tensor`` shares."""
        known, _ = self._once.setdefault(id(tensor), (f"{hint}_{len(self._once)}", tensor))
        return self.shared(known, lambda: tensor)

    def shared(self, hint: str, make: Callable[[], torch.Tensor]) -> Node:
        """A constant that every call with this ``hint`` shares."""
        if hint not in self._shared:
            self._shared[hint] = str(self.constant(hint, make()).target)
        return self.graph.create_node("get_attr", self._shared[hint])

    def weight(
        self, hint: str, weight: torch.Tensor | Int8Weight, transposed_groups: int = 0
    ) -> Node:
        """A weight: int8 codes and scales where it is symmetric int8, else its float value.

        ``transposed_groups`` is the group count of a transposed convolution, whose output
        channels are dimension 1 within each group.
        """
        quantized: tuple[torch.Tensor, torch.Tensor] | None
        if isinstance(weight, Int8Weight):
            quantized = weight.codes, weight.scales
        elif not weight.is_quantized:
            return self.constant(f"{hint}_weight", weight)
        else:
            quantized = symmetric_int8(weight)
        if quantized is None:
            assert isinstance(weight, torch.Tensor)
            node = self.constant(f"{hint}_weight", weight.dequantize())
            node.meta["why"] = f"its weight is {weight.dtype} with a zero point, not symmetric int8"
            return node
        codes, scales = quantized
        return emit(
            self.graph,
            "dequantize_weight",
            weight=self.constant(f"{hint}_weight", codes),
            weight_scales=self.constant(f"{hint}_weight_scales", scales),
            axis=1 if transposed_groups else 0,
        )

    def same_codes(self, x: Any, moved: Node, margins: Sequence[tuple[int, int]]) -> Node:
        """``moved``, which is ``x`` with ``margins``, quantized as ``x`` was (losing nothing)."""
        source = dequantized(x)
        if source is None:
            return moved
        codes = emit(self.graph, "quantize", x=moved, **scale_and_zp("out", source))
        real = emit(self.graph, "dequantize", x=codes, **scale_and_zp("x", source))
        shape = list(source.meta["shape"])
        for axis, (before, after) in enumerate(margins, start=2):
            shape[axis] += before + after
        for node in (moved, codes, real):
            # No tensor of the stock model is this one.
            node.meta.update(source="", shape=tuple(shape))
        return real

    def adopt(self, path: str, module: nn.Module) -> None:
        """Register ``module`` under the dotted ``path``."""
        root = self.root
        *parents, name = path.split(".")
        for parent in parents:
            if not hasattr(root, parent):
                root.add_module(parent, nn.Module())
            root = root.get_submodule(parent)
        root.add_module(name, module)
