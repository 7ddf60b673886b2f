"""What a canonical graph is written with: float calls in one spelling, constants, int8 layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
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


aten = torch.ops.aten


ModuleConverter = Callable[..., Any]


FunctionConverter = Callable[..., Any]


def _margins(module: Any, dims: int) -> list[tuple[int, int]]:
    """Padding before and after each dimension."""
    if not isinstance(module.padding, str):
        return [(p, p) for p in module.padding]
    if module.padding == "valid":
        return [(0, 0)] * dims
    totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [(total // 2, total - total // 2) for total in totals]


def convolution(
    builder: Builder, path: str, module: Any, x: Any, weight: torch.Tensor | Int8Weight, bias: Any
) -> Any:
    """Emit the convolution ``module`` with ``weight`` and ``bias``."""
    codes = weight.codes if isinstance(weight, Int8Weight) else weight
    dims = codes.dim() - 2
    transposed = bool(getattr(module, "transposed", False))
    margins = _margins(module, dims)
    padding = [before for before, _ in margins]
    if module.padding_mode != "zeros" or any(before != after for before, after in margins):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        # F.pad starts with the last dimension.
        sides = [side for margin in reversed(margins) for side in margin]
        x = builder.same_codes(x, builder.call(F.pad, x, sides, mode, None), margins)
        padding = [0] * dims
    return builder.call(
        aten.convolution.default,
        x,
        builder.weight(path, weight, transposed_groups=module.groups if transposed else 0),
        None if bias is None else builder.constant(f"{path}_bias", bias),
        list(module.stride),
        padding,
        list(module.dilation),
        transposed,
        list(module.output_padding) if transposed else [0] * dims,
        module.groups,
    )


def linear(
    builder: Builder,
    path: str,
    x: Any,
    weight: torch.Tensor | Int8Weight,
    bias: torch.Tensor | None,
) -> Any:
    """Emit a linear layer."""
    constant = None if bias is None else builder.constant(f"{path}_bias", bias)
    return builder.call(F.linear, x, builder.weight(path, weight), constant)


def optional(builder: Builder, hint: str, tensor: torch.Tensor | None) -> Node | None:
    """A constant, in float, or None."""
    if tensor is None:
        return None
    return builder.constant(hint, tensor.dequantize() if tensor.is_quantized else tensor)
