"""Configurations of decoders in folders as a GPTQ library, version 1, writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from x86quant.torchvision_import import import_torchvision


def save_llama_config(folder: Path, group_size: int, desc_act: bool, **sizes: Any) -> None:
    """Write the configuration of a Llama of these ``sizes`` in 4 bits."""
    import_torchvision()
    import transformers

    settings = {
        "quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": desc_act
    }  # fmt: skip
    config = transformers.LlamaConfig(
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
        quantization_config=settings,
        **sizes,
    )
    config.save_pretrained(folder)
