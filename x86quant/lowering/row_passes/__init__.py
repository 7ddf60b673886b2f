"""The passes that gather what a transformer does between its products into ops on row codes.

They run on exported graphs: aten ops, our ``linear_dynamic``, and ``meta["val"]`` of every node,
which tells type and sizes. What they do not recognise stays the op it was.
"""

from __future__ import annotations

from types import ModuleType

from x86quant.lowering.passes import fuse_activation
from x86quant.lowering.row_passes import (
    attend_to_cache,
    drop_identities,
    fold_known_values,
    fold_sigmoid_gates,
    fuse_gates,
    fuse_norms,
    fuse_residuals,
    join_products,
    join_rows,
    leave_out_padding,
    merge_masks,
    move_rows_as_codes,
    quantize_attention,
    quantize_products,
    recognise_activations,
    recognise_attention,
    recognise_eager_attention,
    recognise_norms,
    recognise_products,
    recognise_rotation,
    share_row_codes,
    simplify_masks,
    spell_einsums,
    take_tokens,
)

#: Each pass relies on those above it.
ROW_PASSES: tuple[ModuleType, ...] = (
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
