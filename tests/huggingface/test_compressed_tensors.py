"""Checkpoints that compressed-tensors itself wrote, in every scheme of it that can be read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import x86quant
from x86quant.errors import InvalidInputError
from x86quant.huggingface.group_formats import from_compressed_bytes
from x86quant.ops.groups import real_weight

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=256, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    return model


def scheme_of(name: str) -> Any:
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        preset_name_to_scheme,
    )

    own = {
        "by tensor": QuantizationArgs(num_bits=8, strategy="tensor", symmetric=False),
        "groups of 8 bits": QuantizationArgs(num_bits=8, strategy="group", group_size=64),
    }
    if name not in own:
        return preset_name_to_scheme(name, ["Linear"])
    return QuantizationScheme(targets=["Linear"], weights=own[name], format="int-quantized")


def range_of(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "tensor":
        return weight.min(), weight.max()
    groups = weight.unflatten(1, (-1, args.group_size if strategy == "group" else weight.shape[1]))
    return groups.amin(-1), groups.amax(-1)


def written(name: str, folder: Path) -> Any:
    """A checkpoint by the preset ``name``; the float model that the library makes of it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = llama()
    config = QuantizationConfig(config_groups={"group_0": scheme_of(name)}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            args = layer.quantization_scheme.weights
            scale, zero = calculate_qparams(*range_of(layer.weight, args), args)
            layer.weight_scale.data = scale.reshape(layer.weight_scale.shape)
            layer.weight_zero_point.data = zero.reshape(layer.weight_scale.shape).to(torch.int8)
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    meant = llama()
    for path, module in meant.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = model.get_submodule(path).weight.data.float()
    return meant


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("W8A8", 8),
        ("W8A16", 8),
        ("W4A16", 4),
        ("W4A16_ASYM", 4),
        ("W4A8", 4),
        ("by tensor", 8),
        ("groups of 8 bits", 8),
    ],
)
def test_weights_are_those_of_the_library(name: str, bits: int, tmp_path: Path) -> None:
    meant = written(name, tmp_path)
    model = x86quant.huggingface.load(tmp_path, fuse_blocks=False)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, x86quant.DynamicLinear)}
    assert len(layers) == 14
    for path, layer in layers.items():
        assert layer.bits == bits
        torch.testing.assert_close(
            layer.weight.dequantize(), meant.get_submodule(path).weight.data, rtol=1e-5, atol=1e-6
        )
    expected, found = meant(IDS).logits, model(IDS).logits
    assert float(torch.cosine_similarity(expected.flatten(), found.flatten(), 0)) > 0.999
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(x86quant.huggingface.load(tmp_path / "again")(IDS).logits, found)


def test_a_byte_a_weight_with_features_in_another_order() -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (16, 64), generator=draw, dtype=torch.int8)
    scale = torch.rand(16, 2, generator=draw) + 0.1
    zeros = torch.randint(-3, 4, (16, 2), generator=draw, dtype=torch.int8)
    g_idx = torch.randperm(64, generator=draw) // 32
    tensors = {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros}
    found = from_compressed_bytes({**tensors, "weight_g_idx": g_idx.int()}, 64)
    assert found.order is not None
    got = real_weight(found.weight, found.weight_scale)[:, torch.argsort(found.order)]
    expected = (codes - zeros[:, g_idx].float()) * scale[:, g_idx]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    tensors["weight_scale"] = scale.fill_(0)
    with pytest.raises(InvalidInputError, match="scales hold zeros"):
        from_compressed_bytes(tensors, 64)


@pytest.mark.parametrize("kind", ["float", "int"])
def test_a_cache_that_was_calibrated_is_said_not_to_be_used(kind: str, tmp_path: Path) -> None:
    # compressed-tensors 0.20 finds no attention in transformers 5.24, so that it is written here.
    from compressed_tensors.quantization import QuantizationArgs

    written("W8A8", tmp_path)
    plain = x86quant.huggingface.load(tmp_path)
    assert not [note for note in plain.quantization.notes if "cache" in note]
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = QuantizationArgs(num_bits=8, type=kind, strategy="tensor", dynamic=False)
    config["quantization_config"]["kv_cache_scheme"] = json.loads(scheme.model_dump_json())
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    scales = {
        f"model.layers.{i}.self_attn.{name}_scale": torch.tensor([0.05])
        for i in range(2)
        for name in "kv"
    }
    save_file({**load_file(file), **scales}, file, {"format": "pt"})
    model = x86quant.huggingface.load(tmp_path)
    (note,) = (note for note in model.quantization.notes if "cache" in note)
    assert f"a cache of keys and values in {kind}8 with a scale by tensor" in note
    assert "Int8Cache" in str(model.quantization)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    cache = x86quant.Int8Cache(model.config)
    options = {"max_new_tokens": 4, "do_sample": False}
    made = model.generate(IDS[:1], past_key_values=cache, **options)
    assert torch.equal(made[:, :9], IDS[:1])


def test_scales_of_a_cache_are_not_reported_as_unexpected(tmp_path: Path) -> None:
    written("W8A8", tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {"model.layers.0.self_attn.k_scale": torch.tensor([0.05])}
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    _, about = x86quant.huggingface.load(tmp_path, output_loading_info=True)
    assert not about["unexpected_keys"]
    assert copy.copy(about["missing_keys"]) == set()


def test_one_scale_of_the_whole_weight_is_one_of_each_row() -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (16, 64), generator=draw, dtype=torch.int8)
    tensors = {"weight": codes, "weight_scale": torch.tensor([0.5])}
    found = from_compressed_bytes(tensors, 64)
    assert torch.equal(found.weight_scale, torch.full((16,), 0.5))
    tensors["weight_zero_point"] = torch.tensor([3], dtype=torch.int8)
    found = from_compressed_bytes(tensors, 64)
    assert found.weight_scale.shape == (16, 1, 2)
    torch.testing.assert_close(
        real_weight(found.weight, found.weight_scale), (codes.float() - 3) * 0.5
    )
