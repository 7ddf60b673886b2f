"""What ``save_pretrained`` does with models that ``quantize`` made, and to them."""

from __future__ import annotations

import types
import warnings
from pathlib import Path

import pytest
import torch

import x86quant
from x86quant.errors import InvalidInputError

transformers = pytest.importorskip("transformers")


def test_its_graphs_go_on(tmp_path: Path) -> None:
    """Also of a model that was made from a configuration, in which saving fills blanks."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        vocab_size=50,
    )  # fmt: skip
    call = {"input_ids": torch.randint(0, 50, (2, 7))}
    model = transformers.BertModel(config).eval()
    model.options = types.SimpleNamespace(dtype="float32")
    int8 = x86quant.quantize(model, [call] * 2, fuse_blocks=True, speed_check=False, progress=False)
    before = int8(**call).last_hidden_state
    assert "the whole model" in str(int8.quantization)
    assert int8.config.dtype is None
    int8.save_pretrained(tmp_path)
    assert int8.config.dtype is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", x86quant.X86QuantWarning)  # that layers run one by one
        assert torch.equal(int8(**call).last_hidden_state, before)
    assert int8.forward.current()
    int8.options.dtype = "float64"  # of the user's own, which a forward may read
    assert not int8.forward.current()


def test_static_parts_are_refused_and_not_left_out(tmp_path: Path) -> None:
    """Models within the model share its configuration, and have fewer kinds of layers."""
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=32, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4
    )
    call = {"pixel_values": torch.randn(2, 3, 32, 32)}
    model = transformers.SwinModel(config).eval()
    int8 = x86quant.quantize(model, [call] * 2, speed_check=False, progress=False)
    assert int8.quantization.mode == "static and dynamic"
    with pytest.raises(InvalidInputError, match=r"only x86quant\.save can write"):
        int8.save_pretrained(tmp_path)
    x86quant.save(int8, tmp_path / "swin.x86q")
    loaded = x86quant.load(tmp_path / "swin.x86q")
    with torch.no_grad():
        results = [model(**call).last_hidden_state for model in (int8, loaded)]
    assert torch.equal(*results)
