"""The passes that turn a canonical graph into one of ``x86quant`` ops, in the order they run.

A pass is a module with ``run(gm) -> int``, which rewrites the graph in place and returns how much
it changed; the first line of its docstring says what it does.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

from torch.fx import GraphModule

from x86quant.lowering.passes import (
    fold_batch_norm,
    fold_constants,
    fold_float_weights,
    fuse_activation,
    fuse_affine,
    fuse_clamp,
    fuse_interaction,
    fuse_requantize,
    fuse_residual,
    fuse_table,
    give_floats,
    hoist_quantize,
    keep_float_results,
    lay_out_results,
    lower_affine,
    lower_binary,
    lower_cat,
    lower_convolution,
    lower_dynamic_linear,
    lower_layer_norm,
    lower_linear,
    lower_mean,
    lower_pool,
    lower_prelu,
    lower_residual,
    lower_unary,
    lower_upsample,
    nest_cats,
    remove_float_pairs,
    sink_permutes,
    spell_instance_norm,
    unify_cat,
    views_on_codes,
)

#: The whole lowering: each pass relies on those above it.
PASSES: tuple[ModuleType, ...] = (
    fold_constants,
    fold_batch_norm,
    # Float ops between quantized tensors become ops on codes.
    hoist_quantize,
    lower_residual,
    lower_convolution,
    lower_linear,
    lower_dynamic_linear,
    lower_affine,
    lower_binary,
    lower_layer_norm,
    lower_pool,
    lower_mean,
    lower_upsample,
    lower_cat,
    keep_float_results,
    give_floats,
    views_on_codes,
    remove_float_pairs,
    # Clamps before tables: a clamp that an op can do itself needs no table.
    fuse_clamp,
    lower_prelu,
    lower_unary,
    sink_permutes,
    # Epilogues, in the order they run within an op: scale and bias, residual, table.
    fuse_requantize,
    fuse_activation,
    fuse_affine,
    fuse_residual,
    fuse_table,
    unify_cat,
    nest_cats,
    fold_float_weights,
    fuse_interaction,
    spell_instance_norm,
    lay_out_results,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What one pass did."""

    name: str
    changed: int
    description: str

    def __str__(self) -> str:
        return f"{self.name:<20} {self.changed:>5}  {self.description}"


def name_of(module: ModuleType) -> str:
    """``fuse_clamp`` for ``x86quant.lowering.passes.fuse_clamp``."""
    return module.__name__.rsplit(".", 1)[-1]


def run_passes(gm: GraphModule, passes: tuple[ModuleType, ...] = PASSES) -> list[Report]:
    """Run ``passes`` over ``gm`` in order, in place."""
    reports = []
    for module in passes:
        description = (module.__doc__ or "").split("\n", 1)[0]
        reports.append(Report(name_of(module), module.run(gm), description))
    if any(report.changed for report in reports):
        gm.recompile()
    return reports
