"""The native forms of the graph's ops: for each, the sizes of its result and its steps.

A new kind of step is a file in ``kernels/steps`` and its form in a module here, named below.
"""

from __future__ import annotations

from x86quant.runtime.native_form import NativeForm
from x86quant.runtime.native_forms import (
    attending,
    code_rows,
    concatenation,
    float_border,
    kept_in_float,
    lookups,
    per_channel,
    pointwise,
    pooling,
    recurrent_layer,
    reordering,
    rotating,
    token_rows,
    upsampling,
    weighted,
)

_MODULES = (
    attending, code_rows, concatenation, float_border, kept_in_float, lookups, per_channel,
    pointwise, pooling, recurrent_layer, reordering, rotating, token_rows, upsampling, weighted,
)  # fmt: skip

#: By the name of the op.
FORMS: dict[str, NativeForm] = {form.op: form for module in _MODULES for form in module.FORMS}
