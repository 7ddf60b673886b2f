"""``compile``: a stock-converted model in, a module of ``x86quant`` ops out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from x86quant.errors import InvalidInputError
from x86quant.lowering import FloatNode, Lowering, lower
from x86quant.lowering.passes import Report


class CompiledModule(nn.Module):
    """A lowered model: float in, float out, the same results as the model it was made from.

    Attributes:
        graph_module: the graph of ``x86quant`` ops that runs.
        reports: what each pass did.
        float_nodes: the nodes that still run as torch float ops, each with its reason.
    """

    def __init__(self, lowering: Lowering) -> None:
        super().__init__()
        self.graph_module = lowering.graph_module
        self.reports: tuple[Report, ...] = lowering.reports
        self.float_nodes: tuple[FloatNode, ...] = lowering.float_nodes
        placeholders = [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        self._inputs = tuple(_InputSpec.of(node) for node in placeholders)
        self.eval()

    def forward(self, *inputs: Any) -> Any:
        """Run the graph on positional ``inputs`` like those it was compiled for."""
        required = sum(not spec.optional for spec in self._inputs)
        if not required <= len(inputs) <= len(self._inputs):
            raise InvalidInputError(
                f"the compiled model takes {len(self._inputs)} inputs "
                f"({', '.join(spec.name for spec in self._inputs)}), got {len(inputs)}"
            )
        for spec, value in zip(self._inputs, inputs, strict=False):
            spec.check(value)
        return self.graph_module(*inputs)

    def extra_repr(self) -> str:
        """One line: how many nodes run in int8 and in float."""
        calls = [n for n in self.graph_module.graph.nodes if n.op.startswith("call_")]
        return f"nodes={len(calls)}, float_nodes={len(self.float_nodes)}"


class _InputSpec:
    """What an input must look like: the dtype and rank of the example."""

    def __init__(
        self, name: str, dtype: torch.dtype | None, rank: int | None, optional: bool
    ) -> None:
        self.name, self.dtype, self.rank, self.optional = name, dtype, rank, optional

    @staticmethod
    def of(node: Node) -> _InputSpec:
        shape = node.meta.get("shape")
        rank = None if shape is None else len(shape)
        return _InputSpec(node.name, node.meta.get("input_dtype"), rank, bool(node.args))

    def check(self, value: object) -> None:
        if self.rank is None:
            return
        if not isinstance(value, torch.Tensor):
            raise InvalidInputError(f"input {self.name!r} must be a tensor, got {type(value)}")
        if value.dtype != self.dtype:
            raise InvalidInputError(
                f"input {self.name!r} must be {self.dtype}, got {value.dtype}; "
                f"convert it with .to({self.dtype})"
            )
        if value.dim() != self.rank:
            raise InvalidInputError(
                f"input {self.name!r} must have rank {self.rank} as when compiled, "
                f"got shape {tuple(value.shape)}"
            )
        if value.device.type != "cpu":
            raise InvalidInputError(
                f"input {self.name!r} is on {value.device}; x86quant runs on the CPU, use .cpu()"
            )


def compile(model: nn.Module, example_inputs: Sequence[Any]) -> CompiledModule:
    """Compile ``model`` into a module of ``x86quant`` ops on plain uint8 and int8 tensors.

    Args:
        model: what stock ``convert_fx`` or ``convert_to_reference_fx`` returned (or an eager-mode
            converted model that ``torch.fx`` can trace).
        example_inputs: the tuple of positional inputs to run it on once.

    Returns:
        A module with the same inputs and, within one step per layer, the same outputs. Whatever
        has no int8 op runs as the torch float op and is listed in ``float_nodes``.

    Raises:
        InvalidInputError: ``example_inputs`` is not a sequence of inputs.
        UnsupportedError: the model cannot be traced.
    """
    return CompiledModule(lower(model, example_inputs))
