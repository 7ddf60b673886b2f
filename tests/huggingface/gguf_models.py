"""Small random models in GGUF files, as llama.cpp's converter would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils as theirs
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from benchmarks.gguf_files import finish

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_TURNED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
#: By what a file calls the family: the configuration, and its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "mistral": ("MistralConfig", {**_SIZES, "head_dim": 16}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 128}),
    "qwen2moe": ("Qwen2MoeConfig", {**_SIZES, **_EXPERTS}),
    "qwen3moe": ("Qwen3MoeConfig", {**_SIZES, **_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "phi3": ("Phi3Config", _SIZES),
    "starcoder2": ("Starcoder2Config", _SIZES),
    "stablelm": ("StableLmConfig", _SIZES),
    "gpt2": ("GPT2Config", _GPT2),
    "bloom": ("BloomConfig", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {**_SIZES, "num_key_value_heads": 1}),
    "nemotron": ("NemotronConfig", _SIZES),
    "gemma2": ("Gemma2Config", {**_SIZES, "head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {**_SIZES, "head_dim": 16}),
}  # fmt: skip


def random_model(family: str, tied: bool = False) -> Any:
    """A small float model of the ``family``."""
    torch.manual_seed(0)
    kind, sizes = MODELS[family]
    config = getattr(transformers, kind)(**sizes)
    config.tie_word_embeddings = tied or family in ("bloom", "falcon", "gemma2")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def as_converter_has_it(family: str, config: Any, name: str, values: Any) -> Any:
    """What llama.cpp's converter makes of the array called ``name`` in the file."""
    if family in ("llama", "mistral") and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    if family == "bloom" and ".attn_qkv." in name:
        by_head = values.reshape(config.n_head, 3, -1, *values.shape[1:])
        return by_head.swapaxes(0, 1).reshape(values.shape)
    if family in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return values + 1
    if family == "gpt2" and name.endswith(_TURNED):
        return values.T
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return values[0]
    return values


def arrays_of(family: str, model: Any) -> dict[str, Any]:
    """The arrays of the file, by name."""
    processor = theirs.TENSOR_PROCESSORS.get(family, theirs.TensorProcessor)()
    places = theirs.get_gguf_hf_weights_map(
        model, processor, "llama" if family == "mistral" else None
    )
    state = model.state_dict()
    found: dict[str, Any] = {}
    for name, place in places.items():
        if place not in state or (name == "output.weight" and model.config.tie_word_embeddings):
            continue
        values = state[place].numpy()
        full = f"{name}.weight" if name.endswith("_exps") else name
        if "_exps" in name and "down" not in name:
            half = values.shape[1] // 2
            values = values[:, :half] if "gate" in name else values[:, half:]
        found[full] = np.ascontiguousarray(as_converter_has_it(family, model.config, full, values))
    return found


def new_writer(path: Path, family: str, config: Any) -> Any:
    """A writer of the package that has said what the model looks like."""
    writer = gguf.GGUFWriter(path, "llama" if family == "mistral" else family)
    architecture = "llama" if family == "mistral" else family
    if family == "mistral":
        writer.add_name("mistral")
    table = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}.get(family, family)
    for key, attribute in GGUF_CONFIG_MAPPING[table].items():
        value = getattr(config, attribute, None) if attribute else None
        if attribute == "rope_theta":
            value = config.rope_parameters.get("rope_theta")
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_pad_token_id(2)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    return writer


def write_model(path: Path, family: str, kind: str, tied: bool = False) -> Any:
    """A file of the ``family`` whose matrices are of the type ``kind``; the float model of it."""
    model = random_model(family, tied)
    writer = new_writer(path, family, model.config)
    stored = gguf.GGMLQuantizationType[kind]
    for name, values in arrays_of(family, model).items():
        if values.ndim < 2 or "gate_inp" in name or "pos" in name:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    finish(writer)
    return model
