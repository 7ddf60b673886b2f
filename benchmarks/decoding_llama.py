"""llama.cpp as a peer of ``benchmarks.decoding``: the same weights in a GGUF file.

The package gguf writes the file, in Q8_0 or Q4_0 from the first table to the head, under the names
that transformers knows. llama-cpp-python runs it: ``pip install llama-cpp-python``, which compiles
llama.cpp for the CPU it is on. For another level it is compiled so::

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" \\
        pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python

A turn is what llama-bench does: an empty context, the prompt as one batch, then a token at a time,
with the sizes of batches and of memory that are its defaults.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gguf_files import add_sizes, add_tensor, finish

#: What llama.cpp is a peer of, by kind; where rows of queries and keys lie in pairs.
_ROWS_IN_PAIRS = {"llama": True, "qwen3": False}


def write_gguf(model: Any, kind: str, path: Path) -> None:
    """``model`` of transformers, with its matrices in ``kind``, without a vocabulary."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as names_of

    config = model.config
    head = config.head_dim or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, config.model_type)
    add_sizes(writer, config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    parameters = model.state_dict()
    names = names_of.get_gguf_hf_weights_map(model, names_of.TensorProcessor())
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    for name, ours in names.items():
        if ours not in parameters:
            continue
        values = parameters[ours].float()
        count = next((n for part, n in heads.items() if part in name), None)
        if count is not None and _ROWS_IN_PAIRS[config.model_type]:
            values = values.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        add_tensor(writer, name, values.contiguous().numpy(), kind)
    finish(writer)


class LlamaDecoder:
    """A decoder run by llama.cpp, one sequence in a context with room for so many tokens."""

    def __init__(self, model: Any, kind: str, positions: int, folder: Path) -> None:
        import llama_cpp

        path = folder / f"{kind}.gguf"
        write_gguf(model, kind, path)
        self._api = llama_cpp
        self._words = model.config.vocab_size
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = positions
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not run {path}")

    @property
    def weight_bytes(self) -> int:
        """Of the tensors in the file, less the table, of which a token reads one row."""
        size: int = self._api.llama_model_size(self._model)
        per_word = size / self._api.llama_model_n_params(self._model)
        return int(size - per_word * self._words * self._api.llama_model_n_embd(self._model))

    def clear(self) -> None:
        """Forget all tokens."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def add(self, tokens: list[int]) -> np.ndarray:
        """The logits behind ``tokens``, which join those before them."""
        array = (self._api.llama_token * len(tokens))(*tokens)
        batch = self._api.llama_batch_get_one(array, len(tokens))
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp took no {len(tokens)} more tokens")
        found = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, (self._words,))

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """So many tokens behind ``prompt``, always the likeliest."""
        self.clear()
        found = [int(self.add(prompt).argmax())]
        while len(found) < count:
            found.append(int(self.add(found[-1:]).argmax()))
        return found

    def describe(self) -> str:
        """What llama.cpp was compiled for."""
        text: str = self._api.llama_print_system_info().decode()
        return text
