"""``generate`` of int8 decoders: caches, padding, sampling; greedy for as long as margins allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import x86quant

transformers = pytest.importorskip("transformers")

from benchmarks.greedy_agreement import agreement, decoder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

_NEW = 12


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen3"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A decoder with random weights, and its int8 form."""
    transformers.utils.logging.set_verbosity_error()
    model = decoder(request.param, width=32, layers=2, vocabulary=60)
    return model, x86quant.to_dynamic(model)


@pytest.fixture(scope="module")
def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of several lengths, padded on the left, and their mask."""
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :2] = 0
    return ids * mask, mask


def _greedy(model: nn.Module, prompts: tuple[torch.Tensor, torch.Tensor], **options: Any) -> Any:
    ids, mask = prompts
    generate: Any = model.generate
    return generate(ids, attention_mask=mask, max_new_tokens=_NEW, do_sample=False, **options)


def test_every_cache_gives_the_same_tokens(pair: Any, prompts: Any) -> None:
    _, int8 = pair
    expected = _greedy(int8, prompts)
    assert expected.shape == (3, 9 + _NEW)
    dynamic = transformers.DynamicCache(config=int8.config)
    assert torch.equal(_greedy(int8, prompts, past_key_values=dynamic), expected)
    assert torch.equal(_greedy(int8, prompts, cache_implementation="static"), expected)
    assert torch.equal(_greedy(int8, prompts, use_cache=False), expected)


def test_padding_and_batches_change_no_token(pair: Any, prompts: Any) -> None:
    _, int8 = pair
    together = _greedy(int8, prompts)
    for row, (ids, mask) in enumerate(zip(*prompts, strict=True)):
        real = ids[mask.bool()][None]
        alone = _greedy(int8, (real, torch.ones_like(real)))
        assert torch.equal(together[row, -_NEW:], alone[0, -_NEW:])


def test_sampling_and_beams_run(pair: Any, prompts: Any) -> None:
    _, int8 = pair
    ids, mask = prompts
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(int8.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=True))
    assert torch.equal(*drawn)
    assert int8.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=2).shape == (3, 13)


def test_tokens_differ_only_where_the_margin_is_small(pair: Any) -> None:
    float_model, int8 = pair
    for seed in range(4):
        ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(seed))
        found = agreement(float_model, int8, ids, 20)
        assert found.equal <= 20
        if found.equal < 20:
            assert found.margin <= 2 * found.error


def test_quantize_keeps_generate(pair: Any, prompts: Any) -> None:
    float_model, int8 = pair
    data = [{"input_ids": prompts[0][2:], "use_cache": False}]
    model = x86quant.quantize(float_model, data, speed_check=False, progress=False)
    assert torch.equal(_greedy(model, prompts), _greedy(int8, prompts))
