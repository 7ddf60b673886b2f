"""llama.cpp as a back end of ``benchmarks.sentence_efficiency``: the same BERT in a GGUF file.

The file is written by the package gguf, names and vocabulary as llama.cpp's own converter has them;
weights of products are Q8_0. llama-cpp-python runs it, and is built from source where it is
installed: ``pip install llama-cpp-python``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gguf_files import add_sizes, add_tensor, finish

#: Parts of names in transformers' BERT, and what they are called in GGUF.
_NAMES = (
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("encoder.layer.", "blk."),
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
)
#: What llama.cpp reads in float32 alone.
_FLOAT = ("position_embd", "token_types")
_WORD_BEGINS = "\u2581"


def is_installed() -> bool:
    """Whether llama-cpp-python is."""
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        return False
    return True


def write_gguf(bert: Any, tokenizer: Any, path: Path) -> None:
    """``bert`` with products in Q8_0 and mean pooling, and the vocabulary of ``tokenizer``."""
    import gguf

    config = bert.config
    writer = gguf.GGUFWriter(path, "bert")
    add_sizes(writer, config)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _add_vocabulary(writer, tokenizer, config)
    for name, value in bert.state_dict().items():
        if name.startswith("pooler") or not value.is_floating_point():
            continue
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours)
        array = value.detach().to(torch.float32).numpy()
        add_tensor(writer, name, array, "F32" if name.startswith(_FLOAT) else "Q8_0")
    finish(writer)


def _add_vocabulary(writer: Any, tokenizer: Any, config: Any) -> None:
    """A word's beginning is marked where WordPiece marks what is none."""
    import gguf

    words = [f"[unused{place}]" for place in range(config.vocab_size)]
    for word, place in tokenizer.get_vocab().items():
        words[place] = word
    special = set(tokenizer.all_special_ids)
    kinds = [
        gguf.TokenType.CONTROL if place in special else gguf.TokenType.NORMAL
        for place in range(len(words))
    ]
    written = [
        word
        if place in special or (word.startswith("[") and word.endswith("]"))
        else word.removeprefix("##")
        if word.startswith("##")
        else _WORD_BEGINS + word
        for place, word in enumerate(words)
    ]
    writer.add_token_type_count(config.type_vocab_size)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")  # what the converter names plain lower-case WordPiece
    writer.add_token_list(written)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_sep_token_id(tokenizer.sep_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_mask_token_id(tokenizer.mask_token_id)
    writer.add_bos_token_id(tokenizer.cls_token_id)
    writer.add_eos_token_id(tokenizer.sep_token_id)


class LlamaEncoder:
    """What ``encode`` of a SentenceTransformer does, by llama.cpp, tokens and pooling included."""

    def __init__(self, bert: nn.Module, tokenizer: Any, most_tokens: int, folder: Path) -> None:
        from llama_cpp import Llama

        path = folder / "bert.gguf"
        write_gguf(bert, tokenizer, path)
        # A text longer than a batch is cut to it, as the others cut it.
        self._llama = Llama(
            str(path),
            embedding=True,
            n_ctx=most_tokens,
            n_batch=most_tokens,
            n_ubatch=most_tokens,
            n_threads=torch.get_num_threads(),
            n_threads_batch=torch.get_num_threads(),
            verbose=False,
        )

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """One row of numbers for each text."""
        return np.asarray(self._llama.embed(list(texts), truncate=True), dtype=np.float32)
