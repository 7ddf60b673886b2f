"""A tiny BERT in a folder, with a tokenizer that knows a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_TEXT = "a cat sat on the mat and slept while dogs ran over green hills far away"
WORDS = _TEXT.split()


def write_tiny_encoder(path: Path, kind: str = "BertModel", **options: Any) -> Path:
    """A transformers model of this ``kind`` with random weights, large enough to matter."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS)]
    (path / "vocab.txt").write_text("\n".join(names))
    transformers.BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(names),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        **options,
    )
    model = getattr(transformers, kind)(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    model.save_pretrained(path)
    return path
