"""A head that is tied to the table: one storage of codes, in memory and in files, however made."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import x86quant
from x86quant.dynamic import WeightOnlyEmbedding

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

IDS = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))


def llama(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def phi() -> Any:
    """Of a head with a bias."""
    torch.manual_seed(0)
    config = transformers.PhiConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.PhiForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.bias.normal_()
    return model


MODELS = {"llama": llama, "phi": phi}


def check_one_storage(model: Any, bits: int) -> None:
    table, head = model.get_input_embeddings(), model.lm_head
    assert isinstance(table, WeightOnlyEmbedding)
    assert isinstance(head, x86quant.DynamicLinear)
    assert head.bits == bits
    for name in ("int8_weight", "weight_scale"):
        assert getattr(table, name) is getattr(head, name)


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_one_storage_however_made(kind: str, bits: int, tmp_path: Path) -> None:
    model = MODELS[kind]()
    model.save_pretrained(tmp_path / "float")
    made = x86quant.to_dynamic(model, weight_bits=bits, embeddings=True)
    settings = x86quant.X86QuantConfig(weight_bits=bits, embeddings=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=settings
    )
    expected = made(IDS).logits
    for name, one in (("made", made), ("loaded", loaded)):
        check_one_storage(one, bits)
        check_one_storage(copy.deepcopy(one), bits)
        assert torch.equal(one(IDS).logits, expected)
        one.save_pretrained(tmp_path / name)
        stored = load_file(tmp_path / name / "model.safetensors")
        assert [k for k in stored if k.endswith("embed_tokens.int8_weight")]
        assert "lm_head.int8_weight" not in stored
        assert "lm_head.weight_scale" not in stored
        again = x86quant.huggingface.load(tmp_path / name)
        check_one_storage(again, bits)
        assert torch.equal(again(IDS).logits, expected)
    x86quant.save(made, tmp_path / "net.x86q", example_inputs={"input_ids": IDS})
    size = (tmp_path / "net.x86q").stat().st_size
    apart = x86quant.to_dynamic(model, weight_bits=bits, embeddings=True)
    apart.lm_head.int8_weight = apart.lm_head.int8_weight.clone()
    x86quant.save(apart, tmp_path / "apart.x86q", example_inputs={"input_ids": IDS})
    assert (tmp_path / "apart.x86q").stat().st_size - size >= apart.lm_head.int8_weight.nbytes
    from_file = x86quant.load(tmp_path / "net.x86q")
    check_one_storage(from_file, bits)
    assert torch.equal(from_file(input_ids=IDS).logits, expected)


@torch.no_grad()
def test_native_runs_keep_one_storage(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    settings = x86quant.X86QuantConfig(weight_bits=4, embeddings=True, fuse_blocks=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings
    )
    check_one_storage(model, 4)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    plain = x86quant.to_dynamic(llama(), weight_bits=4, embeddings=True)
    assert torch.equal(model.generate(IDS[:1], **options), plain.generate(IDS[:1], **options))


@torch.no_grad()
def test_files_with_codes_of_both_are_read_as_one(tmp_path: Path) -> None:
    made = x86quant.to_dynamic(llama(), weight_bits=4, embeddings=True)
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in ("int8_weight", "weight_scale"):
        stored[f"lm_head.{name}"] = stored[f"model.embed_tokens.{name}"].clone()
    save_file(stored, file, {"format": "pt"})
    again = x86quant.huggingface.load(tmp_path)
    check_one_storage(again, 4)
    assert torch.equal(again(IDS).logits, made(IDS).logits)


@torch.no_grad()
def test_heads_with_codes_of_their_own_keep_them(tmp_path: Path) -> None:
    made = x86quant.to_dynamic(llama(tied=False), weight_bits=4, embeddings=True)
    assert made.lm_head.int8_weight is not made.model.embed_tokens.int8_weight
    made.save_pretrained(tmp_path)
    again = x86quant.huggingface.load(tmp_path)
    assert torch.equal(again(IDS).logits, made(IDS).logits)
    # As the error feedback of quantize chooses codes of a head alone.
    tied = x86quant.to_dynamic(llama(), weight_bits=4, embeddings=True)
    tied.lm_head.int8_weight = tied.lm_head.int8_weight ^ 1
    tied.lm_head.weight_scale = tied.lm_head.weight_scale.clone()
    tied.save_pretrained(tmp_path / "own")
    again = x86quant.huggingface.load(tmp_path / "own")
    assert torch.equal(again.lm_head.int8_weight, tied.lm_head.int8_weight)
    assert torch.equal(again(IDS).logits, tied(IDS).logits)


@torch.no_grad()
def test_quantize_keeps_one_storage() -> None:
    """Of codes that the data chose; the table takes no bytes of its own."""
    model = llama()
    data = [{"input_ids": IDS, "use_cache": False}] * 4
    options = {"speed_check": False, "progress": False, "mode": "dynamic"}
    found = x86quant.quantize(model, data, weight_bits=4, **options)
    check_one_storage(found, found.lm_head.bits)  # 8 where 4 make too much noise
    codes = {
        x.data_ptr(): x.nbytes
        for m in found.modules()
        if isinstance(m, WeightOnlyEmbedding | x86quant.DynamicLinear)
        for x in (m.int8_weight, m.weight_scale)
    }
    held = {x.data_ptr(): x.nbytes for x in (*found.parameters(), *found.buffers())}
    floats = sum(x.nbytes for x in model.parameters() if x.dim() == 1)
    rest = sum(size for at, size in held.items() if at not in codes)
    assert rest < floats + 4096, "norms and angles alone are float"
    whole = sum(x.nbytes for x in model.parameters() if x.dim() > 1)  # the table once
    assert sum(codes.values()) < 0.27 * whole
    rows = found.get_input_embeddings()(IDS)
    assert torch.cosine_similarity(rows, model.get_input_embeddings()(IDS), -1).min() > 0.97
    eight = x86quant.quantize(model, data, **options)
    assert type(eight.get_input_embeddings()) is torch.nn.Embedding
    apart = x86quant.quantize(llama(tied=False), data, weight_bits=4, **options)
    assert type(apart.get_input_embeddings()) is torch.nn.Embedding
    kept = x86quant.quantize(model, data, weight_bits=4, float_layers=["lm_head"], **options)
    assert kept.get_input_embeddings().weight is kept.lm_head.weight
