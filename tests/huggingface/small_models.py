"""Small models of transformers with random weights, and how tests load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import x86quant

TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LLAMA = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def spread(model: nn.Module) -> Any:
    """``model`` with weights large enough for its layers to matter."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    return model.eval()


def loaded_from(folder: Path, kind: str = "AutoModel", **options: Any) -> Any:
    import transformers

    config = x86quant.X86QuantConfig(**options)
    return getattr(transformers, kind).from_pretrained(folder, quantization_config=config)


def layers_of(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def last_state(bert: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return bert(ids).last_hidden_state


def load_with(folder: Path, **options: Any) -> Any:
    from x86quant.huggingface import load

    return load(folder, **options)


def changed_copy(folder: Path, into: Path, change: Any) -> Path:
    """A copy of ``folder`` with ``change`` made to its tensors."""
    from safetensors.torch import load_file, save_file

    into.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_text((folder / "config.json").read_text())
    return into
