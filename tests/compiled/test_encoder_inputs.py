"""Encoders of transformers on odd and wrong input: int8 answers and refuses as float does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import x86quant
from tests.zoo import floats, sqnr
from x86quant.compiled.block_graphs import blocks_of

TOKENS, WORDS, WIDTH = 12, 200, 64
_BERT = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 40,
}  # fmt: skip
_T5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": 2}
_ENCODERS = {
    "BertModel": ("BertConfig", _BERT),
    "BertForSequenceClassification": ("BertConfig", _BERT),
    "T5EncoderModel": ("T5Config", {**_T5, "num_heads": 4}),
}


def ids(sentences: int, tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sentences * tokens)
    return torch.randint(0, WORDS, (sentences, tokens), generator=generator)


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, dtype=torch.long)


#: Of three sentences, whole, of five tokens and of one.
MASK = (torch.arange(TOKENS) < torch.tensor([TOKENS, 5, 1])[:, None]).long()
_NO_ROW = torch.stack([MASK[0], MASK[0] * 0, MASK[1]])
_ADDITIVE = torch.where(MASK[:, None, None].bool(), 0.0, torch.finfo(torch.float32).min)
_EMBEDDED = torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))

_MASKS: dict[str, Any] = {
    "of some tokens": MASK,
    "of a row that is all padding": _NO_ROW,
    "of none": MASK * 0,
    "bool": MASK.bool(),
    "float": MASK.float(),
    "half": MASK.half(),
    "int32": MASK.int(),
    "uint8": MASK.byte(),
    "of twos": MASK * 2,
    "negative": -MASK,
    "padded on the left": MASK.flip(1),
    "with holes": (torch.arange(TOKENS) % 3 != 0).long().expand(3, TOKENS),
    "in another order of memory": MASK.t().contiguous().t(),
    "None": None,
    "too short": MASK[:, :7],
    "too long": ones(3, 20),
    "of fewer sentences": MASK[:2],
    "of one sentence": MASK[:1],
    "of more sentences": MASK.repeat(2, 1),
    "without sentences": MASK[0],
    "of pairs": MASK[:, None, :].repeat(1, TOKENS, 1),
    "additive": _ADDITIVE,
    "additive, of pairs": _ADDITIVE.repeat(1, 1, TOKENS, 1),
}


def masked(mask: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": ids(3), "attention_mask": mask}


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"a mask {name}": masked(mask) for name, mask in _MASKS.items()},
    "no mask": lambda: {"input_ids": ids(3)},
    "int32 ids": lambda: {"input_ids": ids(3).int(), "attention_mask": MASK},
    "float ids": lambda: {"input_ids": ids(3).float(), "attention_mask": MASK},
    "ids beyond the table": lambda: {"input_ids": ids(3) + 190, "attention_mask": MASK},
    "negative ids": lambda: {"input_ids": ids(3) - 50, "attention_mask": MASK},
    "ids in a list": lambda: {"input_ids": ids(3).tolist(), "attention_mask": MASK},
    "one token": lambda: {"input_ids": ids(3, 1), "attention_mask": ones(3, 1)},
    "no tokens": lambda: {"input_ids": ids(3, 0), "attention_mask": ones(3, 0)},
    "no sentences": lambda: {"input_ids": ids(0), "attention_mask": ones(0, TOKENS)},
    "more tokens than places": lambda: {"input_ids": ids(1, 41), "attention_mask": ones(1, 41)},
    "ids without sentences": lambda: {"input_ids": ids(1)[0], "attention_mask": MASK[0]},
    "ids of three dimensions": lambda: {"input_ids": ids(3)[None], "attention_mask": MASK[None]},
    "embeddings": lambda: {"inputs_embeds": _EMBEDDED, "attention_mask": MASK},
    "half embeddings": lambda: {"inputs_embeds": _EMBEDDED.half(), "attention_mask": MASK},
    "double embeddings": lambda: {"inputs_embeds": _EMBEDDED.double(), "attention_mask": MASK},
    "narrow embeddings": lambda: {"inputs_embeds": _EMBEDDED[..., :60], "attention_mask": MASK},
    "no input": dict,
}


@pytest.fixture(scope="module", params=_ENCODERS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """An encoder in float, and in int8 with fused graphs."""
    t = pytest.importorskip("transformers")
    config, sizes = _ENCODERS[request.param]
    torch.manual_seed(0)
    model = getattr(t, request.param)(getattr(t, config)(**sizes)).eval()
    data = [
        {"input_ids": ids(3), "attention_mask": MASK},
        {"input_ids": ids(2, 9), "attention_mask": ones(2, 9)},
    ]
    int8 = x86quant.quantize(model, data, speed_check=False, fuse_blocks=True, progress=False)
    assert blocks_of(int8) is not None
    return model, int8


def answer(model: Any, given: dict[str, Any]) -> list[torch.Tensor] | Exception:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of calls that layers answer one by one
        try:
            return floats(model(**given))
        except Exception as error:
            return error


@pytest.mark.parametrize("kind", CALLS)
def test_int8_answers_or_refuses_as_float_does(models: tuple[Any, Any], kind: str) -> None:
    model, int8 = models
    given = CALLS[kind]()
    expected, found = answer(model, given), answer(int8, given)
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), f"float raises {expected!r}"
        assert str(found)
        return
    assert not isinstance(found, Exception), found
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert sqnr(expected, found) > 25
