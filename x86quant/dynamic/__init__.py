"""Int8 linears on float tensors: the layers, and ``to_dynamic`` that puts them into a model."""

from x86quant.dynamic.convert import (
    activation_name,
    fuse_activations,
    is_linear,
    is_recurrent,
    to_dynamic,
    why_float,
)
from x86quant.dynamic.embedding_bag import WeightOnlyEmbeddingBag
from x86quant.dynamic.layers import (
    DynamicLinear,
    DynamicMultiheadAttention,
    Int8Linear,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
)
from x86quant.dynamic.recurrent import (
    RECURRENT,
    DynamicCell,
    DynamicGRU,
    DynamicGRUCell,
    DynamicLSTM,
    DynamicLSTMCell,
    DynamicRecurrent,
)
from x86quant.dynamic.transformers_config import note_in_config

__all__ = [
    "RECURRENT",
    "DynamicCell",
    "DynamicGRU",
    "DynamicGRUCell",
    "DynamicLSTM",
    "DynamicLSTMCell",
    "DynamicLinear",
    "DynamicMultiheadAttention",
    "DynamicRecurrent",
    "Int8Linear",
    "WeightOnlyEmbedding",
    "WeightOnlyEmbeddingBag",
    "WeightOnlyLinear",
    "activation_name",
    "fuse_activations",
    "is_linear",
    "is_recurrent",
    "note_in_config",
    "to_dynamic",
    "why_float",
]
