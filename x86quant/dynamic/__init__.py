"""Int8 linears on float tensors: the layers, and ``to_dynamic`` that puts them into a model."""

from x86quant.dynamic.convert import activation_name, is_linear, to_dynamic, why_float
from x86quant.dynamic.layers import (
    DynamicLinear,
    DynamicMultiheadAttention,
    Int8Linear,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
)

__all__ = [
    "DynamicLinear",
    "DynamicMultiheadAttention",
    "Int8Linear",
    "WeightOnlyEmbedding",
    "WeightOnlyLinear",
    "activation_name",
    "is_linear",
    "to_dynamic",
    "why_float",
]
