"""``Int8Cache``: in native runs, layer by layer, and what generate does with a cache."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import x86quant
from x86quant.errors import InvalidInputError, UnsupportedError

transformers = pytest.importorskip("transformers")

from benchmarks.greedy_agreement import decoder  # noqa: E402
from x86quant.huggingface.int8_cache import Int8Layer  # noqa: E402
from x86quant.ops.cache_codes import cache_codes, from_cache_codes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

#: Of logits against those with a cache of floats, in dB: these random decoders have about 33.
_FLOOR = 28.0


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen3"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A decoder with random weights, its int8 form with a token step, and without."""
    transformers.utils.logging.set_verbosity_error()
    model = decoder(request.param, width=32, layers=2, vocabulary=60)
    data = [{"input_ids": prompt(2, n), "use_cache": False} for n in (7, 9, 5)]
    fused = x86quant.quantize(model, data, speed_check=False, progress=False, fuse_blocks=True)
    return model, fused, x86quant.to_dynamic(model).eval()


@pytest.fixture
def runs(pair: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many native runs with an int8 cache there were."""
    compiled = pair[1].forward.token_step.on_codes
    counted, run = [0], compiled.run

    def counting(inputs: Any) -> Any:
        counted[0] += 1
        return run(inputs)

    monkeypatch.setattr(compiled, "run", counting)
    return counted


_SEED = torch.Generator().manual_seed(1)


def prompt(batch: int = 1, tokens: int = 6) -> torch.Tensor:
    return torch.randint(3, 60, (batch, tokens), generator=_SEED)


@torch.no_grad()
def added(model: Any, cache: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """The logits of tokens that follow those of ``cache``."""
    found = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **more)
    assert found.past_key_values is cache
    logits: torch.Tensor = found.logits
    return logits


def sqnr(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """In dB."""
    noise = (wanted - found).square().mean()
    return float(10 * torch.log10(wanted.square().mean() / noise))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Codes may fall on the other side of an edge: close in the mean."""
    assert actual.shape == expected.shape
    assert float((actual - expected).square().mean() / expected.square().mean()) < 1e-3


def parts(cache: Any) -> list[torch.Tensor]:
    names = ("key_codes", "value_codes", "key_scales", "value_scales")
    return [getattr(layer, name) for layer in cache.layers for name in names]


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_native_runs_and_those_of_the_layers(
    pair: Any, runs: list[int], batch: int
) -> None:
    _, fused, layers = pair
    cache, other = x86quant.Int8Cache(fused.config), x86quant.Int8Cache(layers.config)
    held = 0
    for tokens in (9, 1, 4, 1, 20, 1):
        ids = prompt(batch, tokens)
        close(added(fused, cache, ids), added(layers, other, ids))
        held += tokens
        assert cache.get_seq_length() == other.get_seq_length() == held
    assert runs == [6]
    for one, two in zip(cache.layers, other.layers, strict=True):
        close(one.keys, two.keys)
        close(one.values, two.values)
    # Of what enters the first layer nothing was rounded before: the very same codes, but for edges.
    assert (parts(cache)[0] - parts(other)[0]).abs().max() <= 1


def test_it_costs_little_accuracy_and_a_quarter_of_the_memory(pair: Any) -> None:
    for model in pair:
        cache, floats = x86quant.Int8Cache(model.config), transformers.DynamicCache()
        for tokens in (60, 1, 1):
            ids = prompt(2, tokens)
            found, wanted = added(model, cache, ids), added(model, floats, ids)
            assert sqnr(wanted, found) > _FLOOR
        size = cache.layers[0].keys.shape[-1]
        whole = sum(x.nbytes for layer in floats.layers for x in (layer.keys, layer.values))
        assert cache.nbytes * 4 * size == whole * (size + 4)


def test_generate_takes_it(pair: Any, runs: list[int]) -> None:
    _, fused, layers = pair
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[2, :7] = 0
    ids = prompt(3, 9)
    ids[mask == 0] = 0
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    cache = x86quant.Int8Cache(fused.config)
    found = fused.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert runs == [6]
    assert found.past_key_values is cache
    logits = torch.stack(found.logits, 1)
    for row, count in enumerate((5, 9, 2)):
        alone = found.sequences[row : row + 1, 9 - count : -1]
        wanted = added(layers, x86quant.Int8Cache(layers.config), alone)
        close(logits[row : row + 1], wanted[:, count - 1 :])


def test_beams_are_reordered(pair: Any, runs: list[int]) -> None:
    """Each beam must be continued by its own past: its logits are those of a run from nothing."""
    _, fused, layers = pair
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 3}
    found = fused.generate(
        prompt(2), past_key_values=x86quant.Int8Cache(fused.config), length_penalty=0.0, **options
    )
    assert runs == [8]
    assert (found.beam_indices[:, :8] != found.beam_indices[:, :1]).any()
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
        logits = added(layers, x86quant.Int8Cache(layers.config), sequence[None, :-1])[0, 5:]
        chosen = logits.log_softmax(-1).gather(1, sequence[6:, None]).sum()
        assert abs(float(chosen - score)) < 0.05


def _cropped(cache: Any) -> None:
    cache.crop(-3)


def _reordered(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def _repeated(cache: Any) -> None:
    cache.batch_repeat_interleave(2)


def _selected(cache: Any) -> None:
    cache.batch_select_indices(torch.tensor([1]))


def _emptied(cache: Any) -> None:
    cache.reset()


@pytest.mark.parametrize("change", [_cropped, _reordered, _repeated, _selected, _emptied])
def test_a_changed_cache_goes_on(pair: Any, runs: list[int], change: Callable[[Any], None]) -> None:
    """As one of floats that is changed alike does, natively and layer by layer."""
    _, fused, layers = pair
    ids = prompt(2)
    caches = [x86quant.Int8Cache(fused.config) for _ in range(2)]
    floats = transformers.DynamicCache()
    for cache, model in zip([*caches, floats], (fused, layers, layers), strict=True):
        added(model, cache, ids)
        added(model, cache, ids[:, :1])
        change(cache)
    more = prompt({_repeated: 4, _selected: 1}.get(change, 2), 1)
    found = [
        added(model, cache, more)
        for cache, model in zip([*caches, floats], (fused, layers, layers), strict=True)
    ]
    close(found[0], found[1])
    assert sqnr(found[2], found[0]) > _FLOOR - 6
    assert runs == [3]
    assert caches[0].get_seq_length() == floats.get_seq_length()


def _unpickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


def _shallow(cache: Any) -> Any:
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


@pytest.mark.parametrize("fork", [copy.deepcopy, _unpickled, _shallow])
def test_two_caches_of_one_past_do_not_write_to_each_other(
    pair: Any, fork: Callable[[Any], Any]
) -> None:
    _, fused, _ = pair
    cache = x86quant.Int8Cache(fused.config)
    added(fused, cache, prompt())
    other = fork(cache)
    added(fused, cache, torch.tensor([[7]]))
    kept = [x.clone() for x in parts(cache)]
    added(fused, other, torch.tensor([[9]]))
    assert all(torch.equal(a, b) for a, b in zip(kept, parts(cache), strict=True))
    assert not torch.equal(parts(other)[4], parts(cache)[4])


def test_it_goes_between_layers_and_native_runs(pair: Any, runs: list[int]) -> None:
    _, fused, layers = pair
    cache, other = (x86quant.Int8Cache(fused.config) for _ in range(2))
    for tokens, more, native in ((8, {}, 1), (1, {"output_hidden_states": True}, 1), (1, {}, 2)):
        ids = prompt(1, tokens)
        close(added(fused, cache, ids, **more), added(layers, other, ids, **more))
        assert runs == [native]


def test_it_outgrows_its_room(pair: Any) -> None:
    _, fused, _ = pair
    cache, ids, rooms = x86quant.Int8Cache(fused.config), prompt(1, 1), set()
    before: list[torch.Tensor] = []
    for held in range(300):
        added(fused, cache, ids)
        rooms.add(cache._x86quant_room.buffer.shape[3])
        if held:
            now = (x[:, :, :held] for x in parts(cache))
            assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        before = [x.clone() for x in parts(cache)]
    assert len(rooms) == 2


def test_both_kinds_of_cache_and_copies_and_changes_of_the_model(pair: Any) -> None:
    """The graph on codes is made of the other, and goes with it."""
    _, fused, layers = pair
    model, ids = copy.deepcopy(fused), prompt()
    for of in (fused, model):
        close(
            added(of, transformers.DynamicCache(config=of.config), ids),
            added(layers, x86quant.Int8Cache(layers.config), ids),
        )
        close(
            added(of, x86quant.Int8Cache(of.config), ids),
            added(layers, x86quant.Int8Cache(layers.config), ids),
        )
    before = added(model, x86quant.Int8Cache(model.config), ids)
    model.lm_head.weight_scale.mul_(2)
    close(added(model, x86quant.Int8Cache(model.config), ids), before * 2)
    assert model.forward.token_step is None


def test_a_saved_decoder_takes_it(pair: Any, tmp_path: Any) -> None:
    _, fused, _ = pair
    x86quant.save(fused, tmp_path / "decoder.xq")
    model = x86quant.load(tmp_path / "decoder.xq")
    ids, caches = prompt(), [x86quant.Int8Cache(fused.config) for _ in range(2)]
    for tokens in (ids, ids[:, :1]):
        found = [added(m, c, tokens) for m, c in zip((fused, model), caches, strict=True)]
        assert torch.equal(*found)
    assert "on_codes" in vars(model.forward.token_step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_model_of_transformers_takes_it(dtype: torch.dtype) -> None:
    model = decoder("llama", width=32, layers=2, vocabulary=60).to(dtype)
    ids = prompt()
    cache = x86quant.Int8Cache(model.config)
    found = added(model, cache, ids).float()
    assert cache.layers[0].keys.dtype is dtype
    wanted = added(model, transformers.DynamicCache(), ids).float()
    assert sqnr(wanted, found) > (_FLOOR if dtype is torch.float32 else 20)


@pytest.mark.parametrize("wrong", ["batch", "heads", "layers"])
def test_a_cache_of_something_else_is_refused(pair: Any, wrong: str) -> None:
    _, fused, layers = pair
    config = copy.deepcopy(fused.config)
    if wrong == "layers":
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
    for model in (fused, layers):
        cache = x86quant.Int8Cache(config)
        batch = 2 if wrong == "batch" else 1
        states = torch.randn(batch, 5, 4, 8)
        if wrong == "heads":
            cache.update(states, states, 0)
        elif wrong == "batch":
            added(model, cache, prompt(2))
        with pytest.raises(InvalidInputError, match=r"made for 1 layers|another batch or model"):
            added(model, cache, prompt(1, 1))


def test_layers_that_do_not_keep_all_tokens_are_refused() -> None:
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)
    with pytest.raises(UnsupportedError, match="sliding_attention"):
        x86quant.Int8Cache(config)


def test_what_cannot_be_held_is_refused() -> None:
    layer, states = Int8Layer(), torch.randn(1, 2, 3, 8)
    with pytest.raises(InvalidInputError, match="gradients"):
        layer.update(states.requires_grad_(), states)
    states = states.detach()
    with pytest.raises(InvalidInputError, match=r"takes floats .* got torch.int64"):
        layer.update(states.long(), states.long())
    with pytest.raises(InvalidInputError, match="with update"):
        layer.keys = states
    assert layer.keys is None
    keys, _ = layer.update(states, states)
    assert torch.equal(keys, from_cache_codes(*cache_codes(states)))
    with pytest.raises(InvalidInputError, match="negative number"):
        layer.crop(2)
    assert layer.get_seq_length() == 3
    layer.crop(-9)
    assert layer.get_seq_length() == 0
