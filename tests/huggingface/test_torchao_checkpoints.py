"""Checkpoints that transformers wrote with ``TorchAoConfig``: read with their own codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import x86quant
from x86quant.errors import UnsupportedError

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchao")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def configuration(name: str) -> Any:
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
    )
    from torchao.quantization.granularity import PerGroup

    return {
        "int8": lambda: Int8WeightOnlyConfig(),
        "int8 by group": lambda: Int8WeightOnlyConfig(granularity=PerGroup(32)),
        "int8 rows": lambda: Int8DynamicActivationInt8WeightConfig(),
        "int4": lambda: IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
        ),
        "int4 rows": lambda: Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
        "float8": lambda: Float8WeightOnlyConfig(),
    }[name]()


def by_transformers(name: str, folder: Path, tables: bool = False) -> Any:
    """A checkpoint in ``folder / "small"``; the model that transformers wrote it of."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    model.save_pretrained(folder / "float")
    settings = transformers.TorchAoConfig(
        configuration(name), include_input_output_embeddings=tables
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "float", quantization_config=settings
    )
    theirs.save_pretrained(folder / "small")
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize(
    ("name", "bits"),
    [("int8", 8), ("int8 by group", 8), ("int8 rows", 8), ("int4", 4), ("int4 rows", 4)],
)
def test_weights_are_those_of_torchao(name: str, bits: int, tables: bool, tmp_path: Path) -> None:
    theirs = by_transformers(name, tmp_path, tables)
    model = x86quant.huggingface.load(tmp_path / "small")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, x86quant.DynamicLinear)}
    assert len(layers) == (15 if tables else 14)
    for path, layer in layers.items():
        assert layer.bits == bits
        expected = theirs.get_submodule(path).weight.dequantize()
        torch.testing.assert_close(layer.weight.dequantize(), expected, rtol=1e-5, atol=1e-6)
    expected, found = theirs(IDS).logits, model(IDS).logits
    assert float(torch.cosine_similarity(expected.flatten(), found.flatten(), 0)) > 0.999
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(x86quant.huggingface.load(tmp_path / "again")(IDS).logits, found)


def changed(folder: Path, name: str, **about: Any) -> None:
    """Let the file say other things of the tensor ``name``."""
    file = folder / "small" / "model.safetensors"
    with safe_open(file, framework="pt") as stored:
        metadata = dict(stored.metadata())
    metadata[name] = json.dumps({**json.loads(metadata[name]), **about})
    save_file(load_file(file), file, metadata)


def test_other_kinds_are_refused_by_name_before_anything_is_read(tmp_path: Path) -> None:
    by_transformers("float8", tmp_path)
    with pytest.raises(UnsupportedError, match=r"_proj: its weight is torchao's Float8Tensor"):
        x86quant.huggingface.load(tmp_path / "small")
    by_transformers("int8", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    for kind, why in (
        ("Int4TilePackedTo4dTensor", "tiles of a CUDA kernel"),
        ("Int4PlainInt32Tensor", "order of an XPU's"),
        ("NF4Tensor", "no form of int8 or int4"),
    ):
        changed(tmp_path, name, _type=kind)
        with pytest.raises(UnsupportedError, match=f"up_proj: .* torchao's {kind}, .*{why}"):
            x86quant.huggingface.load(tmp_path / "small")
    changed(tmp_path, name, _type="Int8Tensor", _tensor_data_names=["qdata", "act_pre_scale"])
    with pytest.raises(UnsupportedError, match="with act_pre_scale beside codes"):
        x86quant.huggingface.load(tmp_path / "small")


def test_a_tensor_that_is_no_weight_of_a_layer_is_refused(tmp_path: Path) -> None:
    by_transformers("int8", tmp_path)
    file = tmp_path / "small" / "model.safetensors"
    with safe_open(file, framework="pt") as stored:
        metadata = dict(stored.metadata())
    metadata["model.layers.0.mlp.experts.gate_up_proj"] = '{"_type": "Int8Tensor", "_data": {}}'
    save_file(load_file(file), file, metadata)
    with pytest.raises(UnsupportedError, match=r"experts\.gate_up_proj is torchao's Int8Tensor"):
        x86quant.huggingface.load(tmp_path / "small")
    del metadata["model.layers.0.mlp.experts.gate_up_proj"]
    metadata["model.norm.weight"] = "{"
    save_file(load_file(file), file, metadata)
    with pytest.raises(UnsupportedError, match=r"says of model\.norm\.weight is not in torchao"):
        x86quant.huggingface.load(tmp_path / "small")


def int4_tensor(real: torch.Tensor, group: int) -> Any:
    """torchao's ``Int4Tensor``, which the kernels' library of GPUs makes: by its definition."""
    from torchao.quantization import Int4Tensor

    groups = real.unflatten(1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15) - 8
    codes = codes.flatten(1).to(torch.int8)
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    zero = (low + 8 * scale).t().contiguous()
    made = Int4Tensor(packed, scale.t().contiguous(), zero, [1, group], real.shape)
    restored = codes.unflatten(1, (-1, group)) * scale[..., None] + zero.t()[..., None]
    return made, restored.flatten(1)


@torch.no_grad()
def test_int4_tensors_are_read_in_memory_and_from_files(tmp_path: Path) -> None:
    theirs = by_transformers("int8", tmp_path)
    meant = {}
    for path, module in theirs.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            made, meant[path] = int4_tensor(module.weight.dequantize(), 32)
            module.weight = nn.Parameter(made, requires_grad=False)
    theirs.save_pretrained(tmp_path / "small")
    loaded = x86quant.huggingface.load(tmp_path / "small", fuse_blocks=False)
    in_memory = x86quant.to_dynamic(theirs, keep=lambda name, _: name == "lm_head")
    for model in (loaded, in_memory):
        for path, expected in meant.items():
            layer = model.get_submodule(path)
            assert layer.bits == 4
            torch.testing.assert_close(layer.weight.dequantize(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(loaded(IDS).logits, in_memory(IDS).logits)


def test_kernels_forms_are_refused_in_memory() -> None:
    from torchao.quantization import Int4TilePackedTo4dTensor

    layer = nn.Linear(64, 64, bias=False)
    packed = torch.zeros(8, 1, 32, 4, dtype=torch.int32)
    pairs = torch.zeros(2, 64, 2, dtype=torch.bfloat16)
    made = Int4TilePackedTo4dTensor(packed, pairs, [1, 32], torch.Size((64, 64)))
    layer.weight = nn.Parameter(made, requires_grad=False)
    with pytest.raises(UnsupportedError, match="Int4TilePackedTo4dTensor, whose codes lie in the"):
        x86quant.to_dynamic(nn.Sequential(layer))
