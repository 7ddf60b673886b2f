"""Tables out of FBGEMM's table-batched module, which torchrec's quantized models hold."""

from __future__ import annotations

from typing import Any

from torch import nn

from x86quant.dynamic.embedding_bag import EmbeddingBags, WeightOnlyEmbeddingBag
from x86quant.errors import UnsupportedError

_BITS = {"INT8": 8, "INT4": 4, "INT2": 2}
_MODES = {"SUM": "sum", "MEAN": "mean"}


def from_table_batched(module: nn.Module) -> EmbeddingBags:
    """The tables of an ``IntNBitTableBatchedEmbeddingBagsCodegen``, one for each of its features.

    Their rows are taken as they lie: float16 scale and bias, then codes. Memory is shared with
    ``module`` where that keeps its weights on the CPU.

    Args:
        module: of ``fbgemm_gpu.split_table_batched_embeddings_ops_inference``, with its weights.

    Raises:
        UnsupportedError: it has tables in other types or another order of bytes, pruned ones, or
            does not pool.
    """
    given: Any = module
    mode = _MODES.get(str(given.pooling_mode.name))
    if mode is None:
        raise UnsupportedError(f"bags are pooled by sum or mean, not {given.pooling_mode.name}")
    remapped = ("index_remappings_array", "index_remapping_hash_table")
    tensors = [getattr(given, name, None) for name in remapped]
    in_a_map = getattr(given, "index_remapping_hash_table_cpu", None) is not None
    if in_a_map or any(x is not None and x.numel() for x in tensors):
        raise UnsupportedError("tables whose indices are remapped (pruned tables) cannot be read")
    if getattr(given, "reverse_qparam", False):
        raise UnsupportedError("rows with scale and bias behind the codes cannot be read")
    tables = []
    scale_bytes = given.scale_bias_size_in_bytes
    weights = given.split_embedding_weights(split_scale_shifts=False)
    for (name, _, dim, kind, _), (rows, *_) in zip(given.embedding_specs, weights, strict=True):
        bits = _BITS.get(str(kind.name))
        if bits is None or scale_bytes != 4:
            raise UnsupportedError(
                f"the table {name} is in {kind.name} with {scale_bytes} bytes of scale and bias; "
                "INT8, INT4 and INT2 with 4 can be read"
            )
        table = WeightOnlyEmbeddingBag(
            rows, mode, bits=bits, half_scale=True, scale_first=True, embedding_dim=dim, name=name
        )
        tables.append(table)
    return EmbeddingBags([tables[i] for i in given.feature_table_map]).eval()
