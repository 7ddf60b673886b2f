"""The passes that gather what a transformer does between its products into ops on row codes.

They run on exported graphs: aten ops, our ``linear_dynamic``, and ``meta["val"]`` of every node,
which tells type and sizes. What they do not recognise stays the op it was.
"""

from __future__ import annotations

from x86quant.lowering.passes import Pass
from x86quant.lowering.passes.epilogues import fuse_activation
from x86quant.lowering.row_passes.decoding import attend_to_cache, take_tokens
from x86quant.lowering.row_passes.eager_attention import (
    recognise_eager_attention,
    spell_einsums,
)
from x86quant.lowering.row_passes.known import drop_identities, fold_known_values
from x86quant.lowering.row_passes.masks import merge_masks, simplify_masks
from x86quant.lowering.row_passes.moved_rows import join_rows, move_rows_as_codes
from x86quant.lowering.row_passes.one_spelling import spell_alike
from x86quant.lowering.row_passes.padding import leave_out_padding
from x86quant.lowering.row_passes.row_activations import (
    fold_sigmoid_gates,
    fuse_gates,
    look_up_reals_moved,
    recognise_activations,
)
from x86quant.lowering.row_passes.row_attention import quantize_attention, recognise_attention
from x86quant.lowering.row_passes.row_norms import fuse_norms, fuse_residuals, recognise_norms
from x86quant.lowering.row_passes.row_products import (
    join_products,
    quantize_products,
    recognise_products,
    share_row_codes,
)
from x86quant.lowering.row_passes.row_rotation import recognise_rotation

#: Each pass relies on those above it.
ROW_PASSES: tuple[Pass, ...] = (
    spell_alike,
    drop_identities,
    recognise_products,
    fold_known_values,
    simplify_masks,
    merge_masks,
    recognise_norms,
    recognise_rotation,
    spell_einsums,
    recognise_eager_attention,
    recognise_attention,
    attend_to_cache,
    take_tokens,
    drop_identities,
    recognise_activations,
    look_up_reals_moved,
    fold_sigmoid_gates,
    fuse_activation,
    share_row_codes,
    move_rows_as_codes,
    fuse_gates,
    fuse_norms,
    fuse_residuals,
    quantize_products,
    quantize_attention,
    join_products,
    join_rows,
    leave_out_padding,
)
