"""Experts in codes as published checkpoints hold them: a linear for gate, up and down of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import x86quant
from tests.huggingface.test_experts import IDS, as_float, mixture
from tests.huggingface.test_group_checkpoints import PACKED, awq, drawn, gptq, packed, real
from x86quant.dynamic import DynamicLinear
from x86quant.dynamic.group_weights import joined
from x86quant.errors import UnsupportedError
from x86quant.ops.groups import real_weight

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

KINDS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV3")
_QUANTIZED = re.compile(r"(.*(?:_proj|\.w[123]))\.weight")
_BYTES: dict[str, Any] = {
    **PACKED,
    "format": "int-quantized",
    "config_groups": {"group_0": {**PACKED["config_groups"]["group_0"], "format": "int-quantized"}},
}


def bytes_of(codes: Any, zeros: Any, scales: Any) -> dict[str, Any]:
    return {
        "weight": (codes - 8).to(torch.int8),
        "weight_scale": scales,
        "weight_zero_point": (zeros - 8).to(torch.int8),
    }


STORES: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        lambda codes, zeros, scales: gptq(codes, zeros, scales, 4),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "packed": (PACKED, packed),
    "bytes": (_BYTES, bytes_of),
}


def written(kind: str, folder: Path, store: str, keep: str = "\0") -> Any:
    """A checkpoint in ``folder / "codes"``; the float model that it means.

    Linears whose names have ``keep`` in them stay float.
    """
    model = mixture(kind)
    model.save_pretrained(folder / "float")
    file = folder / "float" / "model.safetensors"
    tensors, codes = load_file(file), {}
    settings, make = STORES[store]
    for seed, key in enumerate(sorted(tensors)):
        found = _QUANTIZED.fullmatch(key)
        if found is None or keep in key or tensors[key].shape[1] % 32 or len(tensors[key]) % 8:
            continue
        codes_of_it = drawn(len(tensors[key]), tensors[key].shape[1], 32, 4, seed)
        tensors[key] = real(*codes_of_it)
        codes.update({f"{found[1]}.{name}": x for name, x in make(*codes_of_it).items()})
    save_file(tensors, file, {"format": "pt"})
    layers = {key.rpartition(".")[0] for key in codes}
    left = {k: x for k, x in tensors.items() if k.removesuffix(".weight") not in layers}
    (folder / "codes").mkdir()
    save_file({**left, **codes}, folder / "codes" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "float" / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "codes" / "config.json").write_text(json.dumps(config))
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "float")


@torch.no_grad()
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_read_with_their_own_codes(kind: str, store: str, tmp_path: Path) -> None:
    if store == "packed":
        pytest.importorskip("compressed_tensors")
    meant = written(kind, tmp_path, store)
    model = x86quant.huggingface.load(tmp_path / "codes")
    experts = {n: m for n, m in model.named_modules() if re.search(r"_linears\.\d+$", n)}
    assert experts
    assert {(type(m), m.bits) for m in experts.values()} == {(DynamicLinear, 4)}
    assert not [n for n, p in model.named_parameters() if p.dim() == 3 or p.is_meta]
    found = model(IDS).logits
    model.save_pretrained(tmp_path / "again")
    again = x86quant.huggingface.load(tmp_path / "again")
    assert torch.equal(again(IDS).logits, found)
    # In int8 a token may choose other experts; the same numbers in float choose the same.
    torch.testing.assert_close(as_float(model)(IDS).logits, meant(IDS).logits, rtol=1e-3, atol=1e-3)


def test_experts_of_one_layer_may_stay_float(tmp_path: Path) -> None:
    meant = written("Qwen3Moe", tmp_path, "gptq", keep="layers.1.mlp.experts")
    model = x86quant.huggingface.load(tmp_path / "codes")
    assert hasattr(model.get_submodule("model.layers.0.mlp.experts"), "up_linears")
    assert model.get_submodule("model.layers.1.mlp.experts").gate_up_proj.dim() == 3
    with torch.no_grad():
        torch.testing.assert_close(
            as_float(model)(IDS).logits, meant(IDS).logits, rtol=1e-3, atol=1e-3
        )


def test_what_is_half_in_codes_is_refused(tmp_path: Path) -> None:
    written("Qwen3Moe", tmp_path / "1", "gptq", keep="layers.0.mlp.experts.3.up_proj")
    with pytest.raises(UnsupportedError, match=r"experts\.3\.up_proj is not in codes, where"):
        x86quant.huggingface.load(tmp_path / "1" / "codes")
    written("Qwen3Moe", tmp_path / "2", "bytes", keep="layers.1.mlp.experts")
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.experts is in float, where"):
        x86quant.huggingface.load(tmp_path / "2" / "codes")


def test_features_in_another_order(tmp_path: Path) -> None:
    written("Qwen3Moe", tmp_path, "gptq")
    file = tmp_path / "codes" / "model.safetensors"
    names = sorted(load_file(tmp_path / "float" / "model.safetensors"))
    tensors = load_file(file)
    g_idx = torch.randperm(64, generator=torch.Generator().manual_seed(0)) // 32
    for key in [k for k in tensors if re.search(r"experts.*(gate|up)_proj\.qweight", k)]:
        tensors[key.replace("qweight", "g_idx")] = g_idx.int()
    save_file(tensors, file, {"format": "pt"})
    model = x86quant.huggingface.load(tmp_path / "codes")
    experts = "model.layers.0.mlp.experts"
    layer = model.get_submodule(f"{experts}.up_linears.1")
    expected = []
    for part in ("gate", "up"):
        seed = names.index(f"{experts}.1.{part}_proj.weight")
        codes, zeros, scales = drawn(32, 64, 32, 4, seed)
        expected.append((codes - zeros[:, g_idx]) * scales.float()[:, g_idx])
    torch.testing.assert_close(layer.weight + 0, torch.cat(expected), rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        again = x86quant.huggingface.load(tmp_path / "again")
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    tensors[f"{experts}.1.up_proj.g_idx"] = torch.arange(64).int() // 32
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UnsupportedError, match="features in different orders"):
        x86quant.huggingface.load(tmp_path / "codes")


def test_parts_of_different_forms_keep_their_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    nibbles = torch.randint(0, 256, (4, 32), generator=draw, dtype=torch.uint8)
    codes = torch.randint(-128, 128, (6, 64), generator=draw, dtype=torch.int8)
    forms = [
        (nibbles, torch.rand(4, 2, generator=draw).half()),
        (nibbles, torch.rand(4, 4, 2, generator=draw)),
        (codes, torch.rand(6, generator=draw)),
        (codes, torch.rand(6, 8, generator=draw).half()),
    ]
    for one in forms:
        for other in forms:
            expected = torch.cat([real_weight(*one), real_weight(*other)])
            torch.testing.assert_close(real_weight(*joined([one, other])), expected)
