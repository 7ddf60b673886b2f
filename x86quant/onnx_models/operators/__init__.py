"""Every operator, by theme; importing this fills the table."""

from x86quant.onnx_models.operators import (
    attending_ops,
    convolving,
    detecting,
    elementwise_ops,
    indexing_ops,
    normalizing,
    pooling_ops,
    quantized_ops,
    rearranging,
    recurring,
    reducing,
    resizing,
    sequence_ops,
    signal_ops,
)

__all__ = [
    "attending_ops",
    "convolving",
    "detecting",
    "elementwise_ops",
    "indexing_ops",
    "normalizing",
    "pooling_ops",
    "quantized_ops",
    "rearranging",
    "recurring",
    "reducing",
    "resizing",
    "sequence_ops",
    "signal_ops",
]
