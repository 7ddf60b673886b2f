"""The passes that turn a canonical graph into one of ``x86quant`` ops, in the order they run.

A pass is a function that rewrites the graph in place and returns how much it changed; the first
line of its docstring says what it does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch.fx import GraphModule

from x86quant.lowering.passes.cats import lower_cat, nest_cats, unify_cat
from x86quant.lowering.passes.constants import fold_batch_norm, fold_constants, fold_float_weights
from x86quant.lowering.passes.epilogues import (
    fuse_activation,
    fuse_affine,
    fuse_clamp,
    fuse_requantize,
    fuse_table,
)
from x86quant.lowering.passes.float_attention import lower_attention
from x86quant.lowering.passes.float_products import (
    fuse_float_functions,
    fuse_float_rounding,
    lower_float_convolution,
)
from x86quant.lowering.passes.floats import (
    give_floats,
    keep_float_results,
    lay_out_results,
    remove_float_pairs,
)
from x86quant.lowering.passes.functions import (
    look_up_reals,
    lower_affine,
    lower_binary,
    lower_prelu,
    lower_unary,
)
from x86quant.lowering.passes.interaction import fuse_interaction
from x86quant.lowering.passes.moves import hoist_quantize, sink_permutes, views_on_codes
from x86quant.lowering.passes.norms import lower_group_norm, lower_layer_norm, spell_instance_norm
from x86quant.lowering.passes.one_column import turn_columns
from x86quant.lowering.passes.pools import lower_maximum, lower_mean, lower_pool, lower_upsample
from x86quant.lowering.passes.products import lower_convolution, lower_dynamic_linear, lower_linear
from x86quant.lowering.passes.residuals import fuse_residual, lower_residual
from x86quant.lowering.passes.slopes import lower_sloped

Pass = Callable[[GraphModule], int]

#: The whole lowering: each pass relies on those above it.
PASSES: tuple[Pass, ...] = (
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
    lower_group_norm,
    lower_attention,
    lower_pool,
    lower_mean,
    lower_maximum,
    lower_upsample,
    lower_cat,
    keep_float_results,
    lower_sloped,
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
    turn_columns,
    # What stays in float.
    look_up_reals,
    lower_float_convolution,
    fuse_float_functions,
    fuse_float_rounding,
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


def name_of(one: Pass) -> str:
    """The name of a pass, ``fuse_clamp`` say."""
    return one.__name__


def run_pass(one: Pass, gm: GraphModule) -> Report:
    """Run ``one`` over ``gm``, in place."""
    description = (one.__doc__ or "").split("\n", 1)[0]
    return Report(name_of(one), one(gm), description)


def run_passes(gm: GraphModule, passes: tuple[Pass, ...] = PASSES) -> list[Report]:
    """Run ``passes`` over ``gm`` in order, in place."""
    reports = [run_pass(one, gm) for one in passes]
    if any(report.changed for report in reports):
        gm.recompile()
    return reports
