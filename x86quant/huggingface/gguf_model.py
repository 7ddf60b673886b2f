"""A decoder from a GGUF file: its own codes in the linears, which never were floats here.

What a tensor is called, and what the model looks like, transformers and the package gguf know.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import modeling_gguf_pytorch_utils as gguf_names

from x86quant.dynamic import DynamicLinear, WeightOnlyEmbedding, is_linear, note_in_config
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantError
from x86quant.huggingface.gguf_file import GgufTensor, read_gguf
from x86quant.huggingface.gguf_weights import group_weights, is_matrix_of_codes, real_numbers
from x86quant.huggingface.native_graphs import give_graphs
from x86quant.quantization.settings import Switch

#: Families whose tensors lie as transformers has them, but for rows of queries and keys in some.
_ROWS_IN_PAIRS = ("llama", "mistral")
_PLAIN = ("qwen2", "qwen3", "phi3", "starcoder2")


def load_gguf(path: str | os.PathLike[str], fuse_blocks: Switch = "auto") -> Any:
    """The model in the file at ``path``; each linear in codes computes in 4 or 8 bits.

    Raises:
        InvalidInputError: the file is damaged, or lacks tensors of the model.
        UnsupportedError: its architecture, or a type of its tensors, is none that can be read.
    """
    file = Path(path)
    stored = read_gguf(file)  # before others look at it
    config: Any = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if config.model_type not in (*_ROWS_IN_PAIRS, *_PLAIN):
        raise UnsupportedError(
            f"{file} holds a model of the kind {config.model_type!r}; what can be read are "
            f"{', '.join((*_ROWS_IN_PAIRS, *_PLAIN))}"
        )
    model = _empty(config)
    names = gguf_names.get_gguf_hf_weights_map(model, gguf_names.TensorProcessor())
    places = {names[name]: tensor for name, tensor in stored.tensors.items() if name in names}
    if model.config.tie_word_embeddings and "lm_head.weight" not in places:
        places["lm_head.weight"] = places.get("model.embed_tokens.weight")  # type: ignore[assignment]
    missing = [name for name, _ in model.named_parameters() if places.get(name) is None]
    if missing:
        raise InvalidInputError(
            f"{file} lacks {len(missing)} tensors of the model: {', '.join(missing[:4])}"
        )
    # Weights come first, and make the layers that biases belong to.
    for name, tensor in sorted(places.items(), key=lambda place: place[0].endswith(".bias")):
        try:
            _put(model, name, tensor)
        except X86QuantError as error:
            raise type(error)(f"{file}: {name}: {error}") from error
    model.requires_grad_(False).eval()
    note_in_config(model, fuse_blocks)
    give_graphs(model, fuse_blocks)
    return model


def _empty(config: Any) -> Any:
    """The model whose parameters have no memory; other tensors are what it computes them to be."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, value: Any) -> None:
        register(module, name, None if value is None else nn.Parameter(value.to("meta"), False))

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return model


def _put(model: Any, name: str, tensor: GgufTensor) -> None:
    """Let ``tensor`` be the parameter ``name`` of ``model``."""
    path, last = name.rpartition(".")[::2]
    module = model.get_submodule(path)
    own: Any = getattr(module, last)
    if isinstance(module, DynamicLinear):  # its bias, behind its weight
        module.bias = real_numbers(tensor).reshape(own.shape)
        return
    if tuple(own.shape) != tensor.shape:
        raise InvalidInputError(f"it is {tensor.shape}, and the model's {tuple(own.shape)}")
    order = _row_order(model.config, name, tensor.shape[0])
    if last == "weight" and isinstance(module, nn.Embedding) and is_matrix_of_codes(tensor):
        found = group_weights(tensor)
        model.set_submodule(path, WeightOnlyEmbedding(found.weight, found.weight_scale, path))
        return
    if last == "weight" and is_linear(module) and is_matrix_of_codes(tensor):
        found = group_weights(tensor)
        weight, scale = found.weight, found.weight_scale
        if order is not None:
            weight, scale = weight[order], scale[order]
        bias = None if module.bias is None else torch.zeros(module.bias.shape, dtype=torch.float32)
        model.set_submodule(path, DynamicLinear(weight, scale, bias))
        return
    real = real_numbers(tensor)
    setattr(module, last, nn.Parameter(real if order is None else real[order], False))


def _row_order(config: Any, name: str, rows: int) -> torch.Tensor | None:
    """Which row of the file each row of the parameter ``name`` is; None if all are in their places.

    llama.cpp turns pairs of neighbours where transformers turns halves of a head.
    """
    heads = {
        ".q_proj.": config.num_attention_heads,
        ".k_proj.": config.num_key_value_heads,
    }
    if config.model_type not in _ROWS_IN_PAIRS:
        return None
    found = next((count for part, count in heads.items() if part in name), None)
    if found is None:
        return None
    return torch.arange(rows).reshape(found, -1, 2).transpose(1, 2).reshape(rows)
