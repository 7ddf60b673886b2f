"""``compile``: a stock-converted model in, a module that runs in int8 out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from x86quant.compiled.module import CompiledModule
from x86quant.errors import X86QuantWarning
from x86quant.graph_sources import forgotten_with_their_graphs
from x86quant.lowering import lower
from x86quant.lowering.graph_tools import FLOAT_OPS, is_op


def compile(
    model: nn.Module | ExportedProgram,
    example_inputs: Sequence[Any],
    plan_cache_bytes: int | None = None,
) -> CompiledModule:
    """Compile ``model`` into a module of ``x86quant`` ops on plain uint8 and int8 tensors.

    Args:
        model: what stock ``convert_fx`` or ``convert_to_reference_fx`` returned, or an eager-mode
            converted model that ``torch.fx`` can trace, or what PT2E's ``convert_pt2e`` returned,
            as it is or exported.
        example_inputs: the tuple of positional inputs to run it on once.
        plan_cache_bytes: how much memory each segment may keep for plans of input shapes it has
            met; by default the megabytes in ``X86QUANT_PLAN_CACHE_MB``, else 256 MB.

    Returns:
        A module with the same inputs and, within one step per layer, the same outputs. Whatever
        has no int8 op runs as the torch float op and is listed in ``float_nodes``.

    Raises:
        InvalidInputError: ``example_inputs`` is not a sequence of inputs.
        UnsupportedError: the model cannot be traced.
    """
    compiled = build(model, example_inputs, plan_cache_bytes)
    nodes = compiled.graph_module.graph.nodes
    if not any(is_op(node) and not is_op(node, *FLOAT_OPS) for node in nodes):
        warnings.warn(
            f"nothing in {type(model).__name__} is int8, so all of it runs in float: quantize it "
            "first (convert_fx, convert_pt2e), or call x86quant.quantize(model, batches)",
            X86QuantWarning,
            stacklevel=2,
        )
    return compiled


def build(
    model: nn.Module | ExportedProgram,
    example_inputs: Sequence[Any],
    plan_cache_bytes: int | None = None,
    *,
    writes: bool = True,
) -> CompiledModule:
    """As :func:`compile`, for callers who know that nothing may be left in int8.

    ``writes`` is False where no step is known to write to another's value.
    """
    with forgotten_with_their_graphs():
        lowering = lower(model, example_inputs, writes=writes)
    compiled = CompiledModule(
        lowering.graph_module, lowering.reports, lowering.float_nodes, plan_cache_bytes
    )
    with torch.no_grad():
        compiled(*example_inputs)  # packs the weights and plans: errors come now, the rest is fast
    return compiled
