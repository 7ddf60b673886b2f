"""Models of transformers as GGUF files: what those of all kinds have in common."""

from __future__ import annotations

from typing import Any

import numpy as np


def add_sizes(writer: Any, config: Any) -> None:
    """How wide, deep and long the model is, to a ``gguf.GGUFWriter``."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)


def add_tensor(writer: Any, name: str, array: np.ndarray, kind: str) -> None:
    """A tensor of floats: a matrix in ``kind``, and anything else as it is."""
    import gguf

    if array.ndim != 2:
        writer.add_tensor(name, array)
        return
    stored = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)


def finish(writer: Any) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
