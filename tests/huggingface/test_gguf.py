"""GGUF files against the package gguf, and files that were cut off or made to mislead."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import x86quant
from benchmarks.gguf_files import finish
from x86quant.errors import InvalidInputError, UnsupportedError, X86QuantError
from x86quant.huggingface.gguf_file import BLOCK_TYPES, read_gguf
from x86quant.huggingface.gguf_weights import group_weights, is_matrix_of_codes, real_numbers
from x86quant.ops.groups import real_weight

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

_NUMBERS = {kind.name: (number, kind) for number, kind in BLOCK_TYPES.items()}
QUANTIZED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K",
)  # fmt: skip
#: Where a block has float16 numbers, if not at its beginning alone.
_HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
#: Those of which scales and codes are stored as they are.
_EXACT = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "Q3_K", "Q6_K")


def blocks(name: str, rows: int, features: int, seed: int = 0) -> Any:
    """Random bytes of blocks whose float16 scales are ordinary numbers."""
    _, kind = _NUMBERS[name]
    draw = np.random.default_rng(seed)
    found = draw.integers(0, 256, (rows, features // kind.numbers, kind.nbytes), dtype=np.uint8)
    for place in _HALVES.get(name, (0,)):
        scales = draw.normal(0, 0.01, found.shape[:2]).astype(np.float16)
        found[..., place : place + 2] = scales[..., None].view(np.uint8)
    return found.reshape(rows, -1)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file by the package with a tensor of each type."""
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("words", ["a", "bc", ""])
    writer.add_array("numbers", [0.5, 2.0])
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    for name in QUANTIZED:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, blocks(name, 3, 512), raw_dtype=kind)
    finish(writer)
    return path


def test_numbers_are_those_of_the_package(written: Path) -> None:
    found = read_gguf(written)
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["words"] == ["a", "bc", ""]
    assert found.metadata["numbers"] == [0.5, 2.0]
    assert real_numbers(found.tensors["plain"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    for name in QUANTIZED:
        tensor = found.tensors[name]
        assert tensor.shape == (3, 512)
        assert is_matrix_of_codes(tensor)
        raw = tensor.blocks.numpy()
        want = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).copy())
        weights = group_weights(tensor)
        for got in (real_weight(weights.weight, weights.weight_scale), real_numbers(tensor)):
            # An offset is rounded once more, by what 8 scales are.
            assert bool(((got - want).abs() <= 1e-6 * (1 + want.abs())).all()), name
        if name in _EXACT:
            assert torch.equal(real_weight(weights.weight, weights.weight_scale), want), name


def test_files_that_are_cut_off(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    for size in (0, 3, 7, 20, 60, 200, len(whole) - 40):
        path = tmp_path / "short.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidInputError, match=r"empty|ends too early|no GGUF|incomplete"):
            read_gguf(path)


def test_a_tensor_without_numbers_is_refused(written: Path, tmp_path: Path) -> None:
    """Beside a size of zero another may be anything, and no row would be missed in the file."""
    whole = written.read_bytes()
    sizes = struct.pack("<IQQ", 2, 3, 2)
    assert whole.count(sizes) == 1
    path = tmp_path / "nothing.gguf"
    path.write_bytes(whole.replace(sizes, struct.pack("<IQQ", 2, 0, 2**63)))
    with pytest.raises(InvalidInputError, match="'plain' has no numbers"):
        read_gguf(path)


def test_files_with_other_bytes_are_read_or_refused(written: Path, tmp_path: Path) -> None:
    whole, draw = written.read_bytes(), random.Random(0)
    path = tmp_path / "forged.gguf"
    for _ in range(300):
        forged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            forged[draw.randrange(4, 600)] = draw.choice([0, 1, 127, 255, draw.randrange(256)])
        path.write_bytes(forged)
        with contextlib.suppress(X86QuantError):  # and nothing else
            for tensor in read_gguf(path).tensors.values():
                real_numbers(tensor)


def test_versions_and_types_that_are_not_known(written: Path, tmp_path: Path) -> None:
    whole = bytearray(written.read_bytes())
    path = tmp_path / "newer.gguf"
    path.write_bytes(whole[:4] + b"\x04\0\0\0" + whole[8:])
    with pytest.raises(UnsupportedError, match="version 4"):
        read_gguf(path)
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.IQ1_S
    writer.add_tensor("one", np.zeros((2, 50), np.uint8), raw_dtype=kind)
    finish(writer)
    with pytest.raises(UnsupportedError, match="type number 19"):
        read_gguf(path)


def test_scales_that_are_no_numbers(written: Path) -> None:
    tensor = read_gguf(written).tensors["Q4_0"]
    tensor.blocks[1, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    with pytest.raises(InvalidInputError, match="infinite"):
        group_weights(tensor)


# --- whole models ------------------------------------------------------------------------------

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def _llama_file(path: Path, kind: str, tied: bool = False) -> None:
    """A llama of random weights as llama.cpp writes it, rows of queries and keys in pairs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(64)
    stored = gguf.GGMLQuantizationType[kind]
    for name, weight in model.state_dict().items():
        place = name.removesuffix(".weight")
        if place == "lm_head" and tied:
            continue
        if place.startswith("model.layers."):
            number, _, part = place.removeprefix("model.layers.").partition(".")
            place = f"blk.{number}.{_NAMES[part]}"
        else:
            tops = {
                "lm_head": "output",
                "model.norm": "output_norm",
                "model.embed_tokens": "token_embd",
            }
            place = tops[place]
        values = weight.float() * (1 if weight.dim() == 1 else 4)
        if "attn_q" in place or "attn_k" in place:
            heads = 4 if "attn_q" in place else 2
            values = values.reshape(heads, 2, -1, 64).transpose(1, 2).reshape(values.shape)
        array = values.numpy()
        if weight.dim() == 2:
            writer.add_tensor(
                f"{place}.weight", gguf.quants.quantize(array, stored), raw_dtype=stored
            )
        else:
            writer.add_tensor(f"{place}.weight", array)
    finish(writer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [False, True])
def test_models_mean_what_transformers_makes_of_them(kind: str, tied: bool, tmp_path: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    path = tmp_path / "model.gguf"
    _llama_file(path, kind, tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    ours = x86quant.huggingface.load(path)
    linears = [m for m in ours.modules() if isinstance(m, x86quant.DynamicLinear)]
    assert {m.bits for m in linears} == {8 if kind == "Q8_0" else 4}
    assert len(linears) == 15
    for name, parameter in theirs.state_dict().items():
        module = ours.get_submodule(name.rpartition(".")[0])
        assert torch.allclose(
            torch.as_tensor(module.weight) + 0, parameter, rtol=1e-5, atol=1e-6
        ), name
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, found = theirs(ids).logits, ours(ids).logits
    assert float(torch.cosine_similarity(want.flatten(), found.flatten(), 0)) > 0.999
    ours.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(x86quant.huggingface.load(tmp_path / "again")(ids).logits, found)


@pytest.mark.filterwarnings("ignore")
def test_models_that_lack_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _llama_file(path, "Q4_0")
    renamed = path.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx")
    path.write_bytes(renamed)
    with pytest.raises(UnsupportedError, match=r"has 1 tensors that .* has not: blk\.1\.ffn_xx"):
        x86quant.huggingface.load(path)
