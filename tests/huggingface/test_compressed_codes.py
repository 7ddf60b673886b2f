"""Codes that compressed-tensors wrote, taken as they are; what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import x86quant
from tests.huggingface.small_models import (
    layers_of,
    load_with,
)
from x86quant.errors import InvalidInputError, UnsupportedError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


def test_codes_of_compressed_tensors_are_taken_as_they_are(
    w8a8_folder: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    from safetensors.torch import load_file

    model = load_with(w8a8_folder)
    assert type(model) is transformers.LlamaForCausalLM
    stored = load_file(w8a8_folder / "model.safetensors")
    layers = layers_of(model, x86quant.DynamicLinear)
    assert len(layers) == 14
    for name in layers:
        layer = model.get_submodule(name)
        assert torch.equal(layer.int8_weight, stored[f"{name}.weight"])
        assert torch.equal(layer.weight_scale, stored[f"{name}.weight_scale"].reshape(-1))
    lowest = min(int(model.get_submodule(name).int8_weight.min()) for name in layers)
    assert lowest == -128
    theirs = transformers.AutoModelForCausalLM.from_pretrained(w8a8_folder)
    with torch.no_grad():
        expected, found = theirs(ids).logits, model(ids).logits
    assert float((found - expected).norm() / expected.norm()) < 0.06
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(found, again(ids).logits)


def test_the_lowest_code_is_exact() -> None:
    """Codes of other quantizers reach -128, which ours do not."""
    torch.manual_seed(0)
    weight = torch.full((19, 70), -128, dtype=torch.int8)
    weight[::2, ::3] = 127
    scale, x = torch.rand(19) / 100, torch.randn(5, 70) + 1
    found = x86quant.DynamicLinear(weight, scale)(x)
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    step = (high - low) / 255
    zero = torch.round(-low / step)
    codes = (torch.round(x / step[:, None]) + zero[:, None]).clamp(0, 255)
    exact = (codes - zero[:, None]).double() @ weight.double().t()
    assert torch.allclose(found.double(), exact * step[:, None] * scale, rtol=1e-5, atol=1e-4)


W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                "dynamic": True,
            },
        }
    },
}  # fmt: skip


def _with(path: str, value: Any) -> dict[str, Any]:
    settings = copy.deepcopy(W8A8)
    *keys, last = path.split("/")
    inner = settings
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return settings


_GROUP = "config_groups/group_0"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{_GROUP}/format", "float-quantized", "stored as 'float-quantized'"),
        (f"{_GROUP}/weights/num_bits", 6, "weights are int6"),
        (f"{_GROUP}/weights/type", "float", "weights are float8"),
        (f"{_GROUP}/weights/strategy", "block", "scale by 'block'"),
        (f"{_GROUP}/weights/dynamic", True, "weights are not static"),
        (f"{_GROUP}/weights", None, "weights is None"),
        (f"{_GROUP}/input_activations/num_bits", 4, "input_activations are int4"),
        (f"{_GROUP}/input_activations/dynamic", False, "input_activations are not dynamic"),
        (f"{_GROUP}/input_activations/strategy", "tensor", "scale by 'tensor'"),
        (f"{_GROUP}/output_activations", {"num_bits": 8}, "quantized output_activations"),
        ("transform_config", {"config_groups": {"R1": {}}}, "transforms of weights"),
        ("sparsity_config", {"format": "sparse-bitmask"}, "'sparse-bitmask'"),
        ("config_groups", {"W8A8": ["Linear"]}, "preset"),
    ],
)
def test_other_formats_are_refused_in_a_sentence(path: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        x86quant.X86QuantConfig.from_others(_with(path, value))
    assert "\n" not in str(caught.value)
    assert "what can be read are weights of 4 or 8 bits" in str(caught.value)


def test_settings_of_others_are_refused() -> None:
    assert x86quant.X86QuantConfig.from_others(W8A8).checkpoint == "compressed-tensors"
    with pytest.raises(InvalidInputError, match="method 'other'"):
        x86quant.X86QuantConfig.from_others({"quant_method": "other"})
    with pytest.raises(InvalidInputError, match="have no config_groups"):
        x86quant.X86QuantConfig.from_others(_with("config_groups", {}))
