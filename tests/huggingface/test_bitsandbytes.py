"""Checkpoints of bitsandbytes, written by itself: 8 bits as they are, 4 bits refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import x86quant
from x86quant.dynamic import DynamicLinear
from x86quant.errors import InvalidInputError, UnsupportedError

transformers = pytest.importorskip("transformers")
functional = pytest.importorskip("bitsandbytes.functional")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


def saved(folder: Path, **options: Any) -> Any:
    """A small Llama as transformers and bitsandbytes keep it in ``folder``, and the float one."""
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder / "float")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "float",
        quantization_config=transformers.BitsAndBytesConfig(**options),
        device_map="cpu",
        dtype=torch.float32,
    )
    theirs.save_pretrained(folder / "theirs")
    return theirs, model


def test_eight_bits_are_the_same_numbers(tmp_path: Path) -> None:
    theirs, model = saved(tmp_path, load_in_8bit=True)
    ours = x86quant.huggingface.load(tmp_path / "theirs")
    linears = {n: m for n, m in ours.named_modules() if isinstance(m, DynamicLinear)}
    assert len(linears) == 14  # the head stays float there
    for name, linear in linears.items():
        weight = theirs.get_submodule(name).weight
        real = functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        torch.testing.assert_close(linear.weight.dequantize(), real, rtol=1e-6, atol=0)
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, want = ours(ids).logits, model(ids).logits
    assert float(torch.cosine_similarity(found.flatten(), want.flatten(), 0)) > 0.999


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    saved(tmp_path, load_in_4bit=True, bnb_4bit_quant_type=kind)
    with pytest.raises(UnsupportedError, match=rf"\({kind}\).*X86QuantConfig\(weight_bits=4\)"):
        x86quant.huggingface.load(tmp_path / "theirs")


def test_damage_is_named(tmp_path: Path) -> None:
    saved(tmp_path, load_in_8bit=True)
    file = tmp_path / "theirs" / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.mlp.up_proj"
    for value, error, words in (
        ({"SCB": torch.full((96,), torch.nan)}, InvalidInputError, "NaN or infinity"),
        ({"weight_format": torch.tensor(2, dtype=torch.uint8)}, UnsupportedError, "tiles"),
    ):
        changed = {f"{name}.{key}": tensor for key, tensor in value.items()}
        save_file({**whole, **changed}, file, {"format": "pt"})
        with pytest.raises(error, match=rf"{name}.*{words}"):
            x86quant.huggingface.load(tmp_path / "theirs")
