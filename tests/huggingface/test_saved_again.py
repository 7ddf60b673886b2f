"""Models that were quantized while they loaded, saved and read back."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.huggingface.small_models import (
    changed_copy,
    last_state,
    layers_of,
    load_with,
    loaded_from,
)
from x86quant.errors import InvalidInputError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


def test_a_saved_model_is_the_same(bert_folder: Path, int8_folder: Path, ids: torch.Tensor) -> None:
    model, again = loaded_from(bert_folder), transformers.AutoModel.from_pretrained(int8_folder)
    assert torch.equal(last_state(model, ids), last_state(again, ids))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert again.config.quantization_config == x86quant.X86QuantConfig()
    written = json.loads((int8_folder / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "x86quant"
    assert written["bits"] == 8
    assert written["scheme"] == "dynamic"
    sizes = [(x / "model.safetensors").stat().st_size for x in (int8_folder, bert_folder)]
    assert sizes[0] < 0.6 * sizes[1]


def test_any_options_and_shards_survive(llama_folder: Path, tmp_path: Path, ids: Any) -> None:
    options = {"scheme": "weight_only", "modules_to_not_convert": ["mlp"], "embeddings": True}
    model = loaded_from(llama_folder, "LlamaForCausalLM", **options)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load_with(tmp_path)
    assert type(again) is transformers.LlamaForCausalLM
    assert again.config.quantization_config == x86quant.X86QuantConfig(**options)
    assert again.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_another_class_takes_what_it_has(
    llama_folder: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    model = loaded_from(llama_folder, "AutoModelForCausalLM")
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert len(layers_of(base, x86quant.DynamicLinear)) == 14
    assert torch.equal(last_state(base, ids), last_state(model.model, ids))


def test_a_new_process_needs_one_import(int8_folder: Path, ids: torch.Tensor) -> None:
    """And ``import x86quant`` alone does not import transformers."""
    model = transformers.AutoModel.from_pretrained(int8_folder)
    code = (
        "import sys, torch, x86quant\n"
        "assert 'X86QuantConfig' in dir(x86quant) and 'transformers' not in sys.modules\n"
        "from x86quant.torchvision_import import import_torchvision; import_torchvision()\n"
        "import x86quant.huggingface\nfrom transformers import AutoModel\n"
        f"model = AutoModel.from_pretrained({str(int8_folder)!r})\n"
        f"print(float(model(torch.tensor({ids.tolist()})).last_hidden_state.double().sum()))"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert float(found.stdout.split()[-1]) == float(last_state(model, ids).double().sum())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from x86quant import huggingface

    assert "X86QuantConfig" not in x86quant.__all__  # which `from x86quant import *` imports
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'x86quant\[huggingface\]'"):
        runpy.run_path(str(huggingface.__file__))


@pytest.mark.parametrize("weight_only", [False, True])
def test_models_quantized_later_are_saved_alike(
    weight_only: bool, bert: Any, tmp_path: Path, ids: torch.Tensor
) -> None:
    """By a config that says nothing, the int8 layers would come back with random weights."""
    kept = "encoder.layer.1.output.dense"
    model: Any = x86quant.to_dynamic(
        bert, weight_only=weight_only, embeddings=True, keep=lambda name, _: name == kept
    )
    model.save_pretrained(tmp_path / "folder")
    again = load_with(tmp_path / "folder")
    assert layers_of(again, nn.Linear) == [kept]
    assert torch.equal(last_state(model, ids), last_state(again, ids))
    assert not hasattr(bert.config, "quantization_config")
    x86quant.save(again, tmp_path / "model.x86q")
    loaded: Any = x86quant.load(tmp_path / "model.x86q")
    loaded.save_pretrained(tmp_path / "other")
    assert torch.equal(last_state(load_with(tmp_path / "other"), ids), last_state(model, ids))


def test_layers_of_several_kinds_are_refused(bert: Any, tmp_path: Path) -> None:
    model: Any = x86quant.to_dynamic(bert)
    model.pooler.dense = x86quant.WeightOnlyLinear.from_float(bert.pooler.dense)
    model = x86quant.to_dynamic(model)
    with pytest.raises(InvalidInputError, match=r"which only x86quant\.save can write"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_missing_codes_are_refused(int8_folder: Path, tmp_path: Path) -> None:
    lost = "encoder.layer.0.output.dense.weight_scale"
    folder = changed_copy(int8_folder, tmp_path / "lost", lambda x: x.pop(lost))
    with pytest.raises(InvalidInputError, match=f"lacks 1 tensors of int8 layers: {lost}"):
        transformers.AutoModel.from_pretrained(folder)


def test_float_files_that_claim_to_be_int8_are_refused(bert_folder: Path, int8_folder: Path,
                                                       tmp_path: Path) -> None:  # fmt: skip
    folder = changed_copy(bert_folder, tmp_path / "float", lambda _: None)
    (folder / "config.json").write_text((int8_folder / "config.json").read_text())
    with pytest.raises(InvalidInputError, match="no int8 weights at all"):
        transformers.AutoModel.from_pretrained(folder)


def test_spoiled_scales_are_refused(int8_folder: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["pooler.dense.weight_scale"][0] = float("inf")

    with pytest.raises(InvalidInputError, match=r"pooler\.dense: weight_scale holds"):
        transformers.AutoModel.from_pretrained(changed_copy(int8_folder, tmp_path / "inf", spoil))


def test_load_says_what_is_no_int8_model(bert_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="holds a float model: give its from_pretrained"):
        load_with(bert_folder)
