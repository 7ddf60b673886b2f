"""Checkpoints of 4 and 8 bits by other libraries: their codes as they are, and what they mean."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import x86quant
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.huggingface.group_formats import from_awq, from_compressed_tensors, from_gptq
from x86quant.ops.groups import real_weight

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    return model.eval()


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes from 0 on [..., n], as int32 with the first in the lowest bits."""
    each = 32 // bits
    grouped = codes.long().unflatten(-1, (-1, each))
    shifted = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(shifted >= 2**31, shifted - 2**32, shifted).to(torch.int32)


def drawn(
    outputs: int, features: int, group: int, bits: int, seed: int, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K] and zero points [N, G] from 0 on, float16 scales [N, G]."""
    draw = torch.Generator().manual_seed(seed)
    top = 1 << bits
    codes = torch.randint(0, top, (outputs, features), generator=draw)
    zeros = top // 2 + torch.randint(-2, 3, (outputs, features // group), generator=draw)
    scales = (torch.rand(outputs, features // group, generator=draw) + 0.1) / top
    return codes, torch.full_like(zeros, top // 2) if symmetric else zeros, scales.half()


def real(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float weight by the formats' own definition."""
    groups = codes.unflatten(1, (scales.shape[1], -1))
    return ((groups - zeros[..., None]) * scales[..., None].float()).flatten(1)


def gptq(codes: Any, zeros: Any, scales: Any, bits: int, first_zero: int = 1) -> dict[str, Any]:
    stored = (zeros - first_zero) % (1 << bits)
    return {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(stored.t(), bits),
        "scales": scales.t().contiguous(),
    }


def awq(codes: Any, zeros: Any, scales: Any) -> dict[str, Any]:
    def packed(x: torch.Tensor) -> torch.Tensor:
        return words(x.t().unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 4)

    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.t().contiguous()}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("first_zero", [1, 0])
def test_gptq(bits: int, symmetric: bool, first_zero: int) -> None:
    codes, zeros, scales = drawn(24, 64, 32, bits, 1, symmetric)
    found = from_gptq(gptq(codes, zeros, scales, bits, first_zero), 64, first_zero)
    assert found.weight.dtype == (torch.uint8 if bits == 4 else torch.int8)
    assert found.weight_scale.dim() == (2 if symmetric else 3)
    got = real_weight(found.weight, found.weight_scale)
    assert torch.allclose(got, real(codes, zeros, scales), rtol=1e-6, atol=1e-6)


def test_every_zero_point_of_gptq() -> None:
    codes, zeros, scales = drawn(16, 64, 32, 4, 1)
    for first_zero in (0, 1):
        zeros[:] = torch.arange(16)[:, None]
        found = from_gptq(gptq(codes, zeros, scales, 4, first_zero), 64, first_zero)
        got = real_weight(found.weight, found.weight_scale)
        assert torch.allclose(got, real(codes, zeros, scales), rtol=1e-6, atol=1e-6)


def test_a_file_in_which_all_features_are_of_the_first_group() -> None:
    codes, zeros, scales = drawn(16, 64, 32, 4, 2)
    tensors = {**gptq(codes, zeros, scales, 4), "g_idx": torch.zeros(64, dtype=torch.int32)}
    with pytest.raises(InvalidInputError, match="does not give 32 features to each group"):
        from_gptq(tensors, 64)
    tensors["g_idx"] -= 1  # as compressed-tensors says that there is no order
    assert from_gptq(tensors, 64).order is None


def test_gptq_with_features_in_the_order_of_their_importance() -> None:
    codes, zeros, scales = drawn(16, 64, 16, 4, 2)
    g_idx = torch.arange(64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))] // 16
    whole = (codes - zeros[:, g_idx]) * scales.float()[:, g_idx]
    tensors = {**gptq(codes, zeros, scales, 4), "g_idx": g_idx.int()}
    found = from_gptq(tensors, 64)
    assert found.order is not None
    linear = x86quant.DynamicLinear(found.weight, found.weight_scale)
    layer = x86quant.dynamic.ReorderedLinear(linear, found.order)
    assert torch.allclose(layer.weight.dequantize(), whole, rtol=1e-6, atol=1e-6)
    x = torch.randn(5, 64)
    close = torch.cosine_similarity(layer(x), x @ whole.t())
    assert float(close.min()) > 0.999
    tensors["g_idx"][:3] = 0
    with pytest.raises(InvalidInputError, match="g_idx"):
        from_gptq(tensors, 64)


def test_awq() -> None:
    codes, zeros, scales = drawn(24, 64, 32, 4, 3)
    found = from_awq(awq(codes, zeros, scales), 64)
    got = real_weight(found.weight, found.weight_scale)
    assert torch.allclose(got, real(codes, zeros, scales), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(bits: int, symmetric: bool) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes, zeros, scales = drawn(24, 64, 32, bits, 4, symmetric)
    offset = 1 << (bits - 1)
    tensors = {
        "weight_packed": helpers.pack_to_int32((codes - offset).to(torch.int8), bits),
        "weight_scale": scales.bfloat16(),
    }
    if not symmetric:
        packed = helpers.pack_to_int32((zeros - offset).to(torch.int8), bits, packed_dim=0)
        tensors["weight_zero_point"] = packed
    found = from_compressed_tensors(tensors, 64)
    got = real_weight(found.weight, found.weight_scale)
    want = real(codes, zeros, scales.bfloat16())
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_scales_that_are_none(value: float) -> None:
    codes, zeros, scales = drawn(24, 64, 32, 4, 5)
    scales[3, 1] = value
    for read, tensors in (
        (from_gptq, gptq(codes, zeros, scales, 4)),
        (from_awq, awq(codes, zeros, scales)),
    ):
        with pytest.raises(InvalidInputError, match="its scales hold"):
            read(tensors, 64)


def test_groups_that_do_not_divide_and_other_bits() -> None:
    codes, zeros, scales = drawn(24, 64, 32, 4, 6)
    tensors = gptq(codes, zeros, scales, 4)
    with pytest.raises(UnsupportedError, match="words of 32 bits"):
        from_gptq(tensors, 48)
    tensors["scales"] = torch.ones(5, 24, dtype=torch.float16)
    tensors["qzeros"] = torch.full((5, 3), 0x77777777, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="5 groups do not divide 64"):
        from_gptq(tensors, 64)


def written(folder: Path, settings: dict[str, Any], store: Any) -> Any:
    """A checkpoint whose linears, but for the head, ``store`` makes; the float model it means."""
    model = llama()
    tensors, meant = {}, copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            outputs, features = module.weight.shape
            codes, zeros, scales = drawn(outputs, features, 32, 4, len(name))
            tensors.update({f"{name}.{key}": x for key, x in store(codes, zeros, scales).items()})
            meant.get_submodule(name).weight.data = real(codes, zeros, scales)
    left = {
        k: v
        for k, v in model.state_dict().items()
        if f"{k.rpartition('.')[0]}.scales" not in tensors
    }
    left = {k: v for k, v in left.items() if f"{k.rpartition('.')[0]}.weight_scale" not in tensors}
    save_file({**left, **tensors}, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return meant


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": 32,
            },
            "input_activations": None,
        }
    },
}


def packed(codes: Any, zeros: Any, scales: Any) -> dict[str, Any]:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    return {
        "weight_packed": helpers.pack_to_int32((codes - 8).to(torch.int8), 4),
        "weight_scale": scales,
        "weight_zero_point": helpers.pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0),
        "weight_shape": torch.tensor(codes.shape),
    }


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
def test_models_are_read_as_they_are(kind: str, tmp_path: Path) -> None:
    settings, store = {
        "gptq": (
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            lambda *p: gptq(p[0], p[1], p[2], 4),
        ),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
        "compressed-tensors": (PACKED, packed),
    }[kind]
    meant = written(tmp_path, settings, store)
    model = x86quant.huggingface.load(tmp_path)
    layers = [m for m in model.modules() if isinstance(m, x86quant.DynamicLinear)]
    assert len(layers) == 14
    assert {m.bits for m in layers} == {4}
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, found = meant(ids).logits, model(ids).logits
    assert float(torch.cosine_similarity(want.flatten(), found.flatten(), 0)) > 0.999
    again = tmp_path / "again"
    model.save_pretrained(again)
    stored = load_file(again / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    assert torch.equal(stored[f"{name}.int8_weight"], model.get_submodule(name).int8_weight)
    with torch.no_grad():
        assert torch.equal(x86quant.huggingface.load(again)(ids).logits, found)


def test_a_model_with_features_in_another_order(tmp_path: Path) -> None:
    order = {n: torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in (64, 96)}

    def store(codes: Any, zeros: Any, scales: Any) -> dict[str, Any]:
        g_idx = torch.empty(codes.shape[1], dtype=torch.int32)
        g_idx[order[codes.shape[1]]] = torch.arange(codes.shape[1], dtype=torch.int32) // 32
        # The codes of features in their own places, each by the scales of its group.
        placed = torch.empty_like(codes)
        placed[:, order[codes.shape[1]]] = codes
        return {**gptq(placed, zeros, scales, 4), "g_idx": g_idx}

    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    meant = written(tmp_path, settings, store)
    for name, module in meant.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            placed = torch.empty_like(module.weight.data)
            placed[:, order[module.in_features]] = module.weight.data
            module.weight.data = placed
    model = x86quant.huggingface.load(tmp_path, fuse_blocks=True)
    layers = [m for m in model.modules() if isinstance(m, x86quant.dynamic.ReorderedLinear)]
    assert len(layers) == 14
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, found = meant(ids).logits, model(ids).logits
    assert float(torch.cosine_similarity(want.flatten(), found.flatten(), 0)) > 0.999
    names = [n.op for n in model.forward.token_step.compiled.float_nodes]
    assert "index_select" not in " ".join(names)
    model.save_pretrained(tmp_path / "again")
    again = x86quant.huggingface.load(tmp_path / "again")
    assert len([m for m in again.modules() if isinstance(m, type(layers[0]))]) == 14
    with torch.no_grad():
        assert torch.equal(again(ids).logits, found)
    file = tmp_path / "again" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.1.mlp.up_proj.order"][3] = 0
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(InvalidInputError, match=r"up_proj: its order does not name each of 64"):
        x86quant.huggingface.load(tmp_path / "again")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "auto-round", "bits": 4}, "gptq"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
            "awq",
        ),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"}, "gptq_v2"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
    ],
)
def test_names_of_formats(settings: dict[str, Any], name: str) -> None:
    assert x86quant.X86QuantConfig.from_others(settings).checkpoint == name


@pytest.mark.parametrize("bits", [4, 8])
def test_float_models_are_quantized_as_they_are_read(bits: int, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "float")
    found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=x86quant.X86QuantConfig(weight_bits=bits)
    )
    layers = x86quant.to_dynamic(model, weight_bits=bits)
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(found(ids).logits, layers(ids).logits)
        found.save_pretrained(tmp_path / "small")
        again = x86quant.huggingface.load(tmp_path / "small")
        assert torch.equal(again(ids).logits, found(ids).logits)
    assert again.model.layers[0].mlp.up_proj.bits == bits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "have 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "itrex"}, "'itrex'"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "are mx_fp"),
    ],
)
def test_other_forms_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        x86quant.X86QuantConfig.from_others(settings)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_tables_of_16_bits_stay_so(kind: torch.dtype, tmp_path: Path) -> None:
    """Rows become float32 as they are looked up: half of the table's memory."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    written(tmp_path, settings, lambda *p: gptq(p[0], p[1], p[2], 4))
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.embed_tokens.weight"
    stored[name] = stored[name].to(kind)
    save_file(stored, file, {"format": "pt"})
    model = x86quant.huggingface.load(tmp_path, fuse_blocks=True)
    table = model.get_input_embeddings()
    assert isinstance(table, x86quant.dynamic.HalfEmbedding)
    assert table.weight.dtype is kind
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(table(ids), stored[name][ids].float())
    assert model.forward.token_step is not None, "a native run looks it up"
    with torch.no_grad():
        expected = model(ids).logits
        model.save_pretrained(tmp_path / "again")
        again = x86quant.huggingface.load(tmp_path / "again", fuse_blocks=True)
        assert again.get_input_embeddings().weight.dtype is kind
        assert torch.equal(again(ids).logits, expected)
        x86quant.save(model, tmp_path / "net.x86q")
        kept = x86quant.load(tmp_path / "net.x86q")
        assert torch.equal(kept(ids).logits, expected)
        assert kept.get_input_embeddings().weight.dtype is kind
