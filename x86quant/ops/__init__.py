"""The graph's own operators, ``torch.ops.x86quant.*``, on plain uint8 and int8 tensors.

Every op is written once, slowly and exactly, in plain torch: that one function is its CPU
implementation, its fake kernel and the statement of its numerics. Faster kernels are plugged in
beneath; they must agree within one step of the output scale. ``docs/graph.md`` lists the schemas.

Importing this package registers the ops.
"""

from __future__ import annotations

from x86quant.ops import (
    attention,
    cache_codes,
    conv,
    dynamic,
    elementwise,
    embedding,
    float_conv,
    norm,
    pool,
    quantization,
    recurrence,
    rotation,
    rows,
    shape,
    tokens,
)
from x86quant.ops._register import NAMESPACE, SCHEMAS

__all__ = [
    "NAMESPACE",
    "SCHEMAS",
    "attention",
    "cache_codes",
    "conv",
    "dynamic",
    "elementwise",
    "embedding",
    "float_conv",
    "norm",
    "pool",
    "quantization",
    "recurrence",
    "rotation",
    "rows",
    "shape",
    "tokens",
]
