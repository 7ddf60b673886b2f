"""A decoder has the same graphs however its layers became int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import x86quant
from x86quant.compiled.compiled_parts import compiled_parts

transformers = pytest.importorskip("transformers")


def test_a_decoder_that_was_loaded_has_the_graphs_of_one_that_was_quantized(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    from x86quant.huggingface import X86QuantConfig as kind  # noqa: N813

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=kind(fuse_blocks=True)
    )
    ids = {"input_ids": torch.randint(64, (2, 12)), "attention_mask": torch.ones(2, 12).long()}
    quantized: Any = x86quant.quantize(
        model, [ids], mode="dynamic", fuse_blocks=True, speed_check=False, progress=False
    )
    paths = [{path for path, _ in compiled_parts(one)} for one in (loaded, quantized)]
    assert paths[0] == paths[1]
    assert "" in paths[0]
    for one in (loaded, quantized):
        assert one.forward.token_step is not None
    with torch.no_grad():
        assert torch.equal(loaded(**ids).logits, quantized(**ids).logits)
