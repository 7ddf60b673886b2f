"""Classifiers of transformers on padded sentences: what is left out, and which masks are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import x86quant
from x86quant.compiled.block_graphs import blocks_of
from x86quant.errors import X86QuantWarning
from x86quant.lowering.graph_tools import is_op

IDS = torch.randint(0, 500, (8, 20), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(20) < torch.tensor([20, 3, 11, 1, 8, 19, 5, 2])[:, None]).long()


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A classifier that reads the first token, in float and in int8."""
    t = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = t.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        vocab_size=500,
    )  # fmt: skip
    model = t.BertForSequenceClassification(config).eval()
    data = [{"input_ids": IDS, "attention_mask": MASK}]
    made = x86quant.quantize(model, data, speed_check=False, fuse_blocks=True)
    return model, made


def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
        return found


def test_padding_is_left_out_and_no_sentence_knows_of_the_others(models: tuple[Any, Any]) -> None:
    float_model, model = models
    graphs = blocks_of(model)
    assert graphs is not None
    nodes = graphs.graphs[0].compiled.graph_module.graph.nodes
    assert any(is_op(node, "present_tokens") for node in nodes)
    found = logits(model, IDS, MASK)
    torch.testing.assert_close(found, logits(float_model, IDS, MASK), atol=5e-3, rtol=0)
    for row, count in enumerate(MASK.sum(1).tolist()):
        alone = logits(model, IDS[row : row + 1, :count], MASK[row : row + 1, :count])
        assert torch.equal(found[row : row + 1], alone)


def test_rows_of_a_mask_that_no_sentence_has_do_not_count(models: tuple[Any, Any]) -> None:
    assert torch.equal(logits(models[1], IDS, MASK.repeat(2, 1)), logits(models[1], IDS, MASK))


def test_a_mask_that_only_the_model_itself_takes_is_taken(models: tuple[Any, Any]) -> None:
    float_model, model = models
    with pytest.warns(X86QuantWarning, match="ran one by one"):
        found = logits(model, IDS, MASK[:1])
    torch.testing.assert_close(found, logits(float_model, IDS, MASK[:1]), atol=5e-3, rtol=0)


@pytest.mark.parametrize("mask", [MASK[:3], MASK[:, :10]], ids=["too few", "too short"])
def test_masks_that_do_not_fit_raise_what_the_model_raises(
    models: tuple[Any, Any], mask: torch.Tensor
) -> None:
    with pytest.raises((IndexError, RuntimeError)) as wanted:
        logits(models[0], IDS, mask)
    with pytest.raises(wanted.type) as raised:
        logits(models[1], IDS, mask)
    assert str(raised.value) == str(wanted.value)
