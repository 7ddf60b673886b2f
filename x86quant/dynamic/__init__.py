"""Int8 linears on float tensors: the layers, and ``to_dynamic`` that puts them into a model."""

from x86quant.dynamic.convert import (
    adapt_containers,
    is_linear,
    is_recurrent,
    to_dynamic,
    why_float,
)
from x86quant.dynamic.embedding_bag import (
    DotInteraction,
    EmbeddingBags,
    QuantizedTable,
    RowwiseEmbedding,
    WeightOnlyEmbeddingBag,
)
from x86quant.dynamic.experts import is_experts
from x86quant.dynamic.group_weights import check_bits
from x86quant.dynamic.layers import (
    DynamicLinear,
    HalfEmbedding,
    Int8Linear,
    WeightOnlyEmbedding,
    WeightOnlyLinear,
)
from x86quant.dynamic.multihead_attention import DynamicMultiheadAttention
from x86quant.dynamic.recurrent import (
    RECURRENT,
    DynamicCell,
    DynamicGRU,
    DynamicGRUCell,
    DynamicLSTM,
    DynamicLSTMCell,
    DynamicRecurrent,
)
from x86quant.dynamic.reordered import ReorderedLinear
from x86quant.dynamic.table_batched import from_table_batched
from x86quant.dynamic.transformers_config import note_in_config

#: What every int8 layer that may run by itself is an instance of.
INT8_LAYERS = (
    DynamicCell,
    DynamicMultiheadAttention,
    DynamicRecurrent,
    Int8Linear,
    QuantizedTable,
    WeightOnlyEmbedding,
)

__all__ = [
    "INT8_LAYERS",
    "RECURRENT",
    "DotInteraction",
    "DynamicCell",
    "DynamicGRU",
    "DynamicGRUCell",
    "DynamicLSTM",
    "DynamicLSTMCell",
    "DynamicLinear",
    "DynamicMultiheadAttention",
    "DynamicRecurrent",
    "EmbeddingBags",
    "HalfEmbedding",
    "Int8Linear",
    "QuantizedTable",
    "ReorderedLinear",
    "RowwiseEmbedding",
    "WeightOnlyEmbedding",
    "WeightOnlyEmbeddingBag",
    "WeightOnlyLinear",
    "adapt_containers",
    "check_bits",
    "from_table_batched",
    "is_experts",
    "is_linear",
    "is_recurrent",
    "note_in_config",
    "to_dynamic",
    "why_float",
]
