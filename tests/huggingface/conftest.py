"""Small checkpoints, once for each file of tests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface.small_models import (
    LLAMA,
    TEXT,
    loaded_from,
    spread,
)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return spread(transformers.BertModel(transformers.BertConfig(**TEXT)))


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return spread(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))


@pytest.fixture(scope="module")
def bert_folder(bert: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bert")
    bert.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def int8_folder(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("int8")
    loaded_from(bert_folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def w8a8_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint written by the package compressed-tensors itself."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    model = copy.deepcopy(llama)
    groups = {"group_0": preset_name_to_scheme("W8A8", ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            # Its codes reach -128.
            layer.weight_scale.data = layer.weight.detach().abs().amax(1, keepdim=True) / 127.5
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder: Path = tmp_path_factory.mktemp("w8a8")
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder
