"""Prompts and the newest token of a decoder in one native run, or layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import x86quant
from x86quant import extension
from x86quant.artifacts.file.content import Content
from x86quant.artifacts.records.guarded_form import read_token_step, write_token_step
from x86quant.compiled.block_graphs import BlockGraphs
from x86quant.compiled.token_step import TokenStep

transformers = pytest.importorskip("transformers")

from benchmarks.greedy_agreement import agreement, decoder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen3"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """A decoder with random weights, its int8 form with a token step, and without."""
    transformers.utils.logging.set_verbosity_error()
    model = decoder(request.param, width=32, layers=2, vocabulary=60)
    data = [{"input_ids": torch.randint(3, 60, (2, n)), "use_cache": False} for n in (7, 9, 5)]
    fused = x86quant.quantize(model, data, speed_check=False, progress=False, fuse_blocks=True)
    assert "prompts and each new token of generate are one native run" in str(fused.quantization)
    return model, fused, x86quant.to_dynamic(model).eval()


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Counts the native runs of the token step of ``model``."""
    step = model.forward.token_step
    runs = [0]
    run = step.compiled.run

    def counting(inputs: Any) -> Any:
        runs[0] += 1
        return run(inputs)

    step.compiled.run = counting
    try:
        yield runs
    finally:
        del step.compiled.run


def prompt(batch: int = 1, tokens: int = 6) -> torch.Tensor:
    return torch.randint(3, 60, (batch, tokens))


def prefilled(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, return_dict=True).past_key_values


@torch.no_grad()
def added(model: Any, cache: Any, ids: torch.Tensor, **more: Any) -> Any:
    """What a call with one token more returns."""
    given = {"past_key_values": cache, "use_cache": True, "return_dict": True, **more}
    return model(input_ids=ids, **given)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Close in the mean: codes may fall on the other side of an edge.

    Attention in bfloat16 moves many of them: then two int8 forms differ as much from one another
    as either does from float, which is up to 1e-3 of these models' energy, and 3e-3 of a token's.
    """
    assert actual.shape == expected.shape
    noise = float((actual - expected).square().mean() / expected.square().mean())
    assert noise < 1e-2


def assert_alike(cache: Any, other: Any) -> None:
    for one, two in zip(cache.layers, other.layers, strict=True):
        close(one.keys, two.keys)
        close(one.values, two.values)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 6), (3, 4), (1, 1)])
def test_tokens_follow_in_native_runs(pair: Any, batch: int, tokens: int) -> None:
    _, fused, layers = pair
    ids = prompt(batch, tokens)
    cache, other = prefilled(layers, ids), prefilled(layers, ids)
    with counted(fused) as runs:
        for length in range(tokens, tokens + 9):
            token = prompt(batch, 1)
            found, expected = added(fused, cache, token), added(layers, other, token)
            close(found.logits, expected.logits)
            assert type(found) is type(expected)
            assert found.past_key_values is cache
            assert cache.get_seq_length() == length + 1
        assert runs == [9]
    assert_alike(cache, other)


def test_generate_takes_them(pair: Any) -> None:
    float_model, fused, _ = pair
    ids = prompt()
    with counted(fused) as runs:
        fused.generate(ids, max_new_tokens=9, do_sample=False)
    assert runs == [9]
    for _ in range(3):
        found = agreement(float_model, fused, prompt(), 20)
        assert found.equal <= 20
        assert found.is_explained


def test_a_cache_outgrows_its_room(pair: Any) -> None:
    _, fused, layers = pair
    cache, other, ids = prefilled(layers, prompt()), prefilled(layers, prompt()), prompt(1, 1)
    other = copy.deepcopy(cache)
    rooms = set()
    for _ in range(300):
        added(fused, cache, ids)
        rooms.add(cache._x86quant_room.buffer.shape[3])
    with torch.no_grad():
        expected = added(layers, other, ids.expand(1, 300), use_cache=True)
    assert len(rooms) == 2
    assert cache.get_seq_length() == 306
    close(cache.layers[1].keys, expected.past_key_values.layers[1].keys)


def _copied(cache: Any) -> Any:
    return copy.deepcopy(cache)


def _same_tensors(cache: Any) -> Any:
    other = transformers.DynamicCache()
    for number, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, number)
        other.layers[number].keys, other.layers[number].values = layer.keys, layer.values
    return other


def _shallow(cache: Any) -> Any:
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


@pytest.mark.parametrize("fork", [_copied, _same_tensors, _shallow])
def test_two_caches_of_one_past_do_not_write_to_each_other(
    pair: Any, fork: Callable[[Any], Any]
) -> None:
    _, fused, _ = pair
    cache = prefilled(fused, prompt())
    added(fused, cache, torch.tensor([[5]]))
    other = fork(cache)
    added(fused, cache, torch.tensor([[7]]))
    kept = [x.clone() for layer in cache.layers for x in (layer.keys, layer.values)]
    added(fused, other, torch.tensor([[9]]))
    now = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert not torch.equal(other.layers[1].keys, cache.layers[1].keys)


def test_what_a_cache_showed_stays_as_it_was(pair: Any) -> None:
    _, fused, _ = pair
    cache = prefilled(fused, prompt(2))
    added(fused, cache, prompt(2, 1))
    shown = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    before = [x.clone() for x in shown]
    added(fused, cache, prompt(2, 1))
    assert all(torch.equal(a, b) for a, b in zip(shown, before, strict=True))
    for layer in cache.layers:  # others may write what they are shown
        layer.keys.add_(1)
        layer.values = layer.values + 1
    other, token = copy.deepcopy(cache), prompt(2, 1)
    close(added(fused, cache, token).logits, added(fused, other, token).logits)


def test_modes_that_watch_see_the_views_of_a_cache(pair: Any) -> None:
    _, fused, _ = pair
    cache = prefilled(fused, prompt())
    seen = []

    class Watching(TorchDispatchMode):
        only_watches = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        added(fused, cache, prompt(1, 1))
    assert "aten.unbind.int" in seen
    assert cache.get_seq_length() == 7


def test_parts_up_to_are_views_of_memory() -> None:
    parts_up_to = extension.fast().parts_up_to
    if extension.fast() is extension.native():  # torch's own ops make them
        assert parts_up_to(torch.rand(6, 2, 3, 8), 1) is None
        return
    for whole in (torch.rand(6, 2, 3, 8, 4), torch.rand(6, 2, 3, 8), torch.rand(7, 3, 8, 2, 2).mT):
        size = whole.shape[3]
        for held in (0, 1, size):
            found = parts_up_to(whole[1:], held)
            expected = whole[1:, :, :, :held].unbind()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert [x.stride() for x in found] == [x.stride() for x in expected]
            assert [x.data_ptr() for x in found] == [x.data_ptr() for x in expected]
        for wrong in (-1, size + 1):
            with pytest.raises(ValueError, match="has no"):
                parts_up_to(whole, wrong)
    with pytest.raises(ValueError, match="dimension 3"):
        parts_up_to(torch.rand(2, 2, 2), 1)
    with pytest.raises(TypeError, match="takes a tensor and a number"):
        parts_up_to([1], 1)


def test_a_cropped_and_a_reordered_cache_go_on(pair: Any) -> None:
    _, fused, layers = pair
    cache = prefilled(layers, prompt(2))
    added(fused, cache, prompt(2, 1))
    for change in (lambda c: c.crop(-3), lambda c: c.reorder_cache(torch.tensor([1, 0]))):
        change(cache)
        other, token = copy.deepcopy(cache), prompt(2, 1)
        close(added(fused, cache, token).logits, added(layers, other, token).logits)


def test_what_it_is_not_for_runs_layer_by_layer(pair: Any) -> None:
    _, fused, layers = pair
    one = prompt(1, 1)
    hidden = torch.ones(1, 7, dtype=torch.long)
    hidden[0, 3] = 0  # in the middle
    odd = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    odd[..., 4] = False
    cases: list[tuple[Any, torch.Tensor, dict[str, Any]]] = [
        (prefilled(layers, prompt()), one, {"attention_mask": hidden}),
        (prefilled(layers, prompt()), one, {"attention_mask": odd}),
        (prefilled(layers, prompt()), one, {"output_hidden_states": True}),
        (prefilled(layers, prompt()), prompt(1, 3), {"logits_to_keep": torch.tensor([1])}),
        (transformers.DynamicCache(), one, {}),  # without layers yet
    ]
    with counted(fused) as runs:
        for cache, ids, more in cases:
            other = copy.deepcopy(cache)
            found, expected = added(fused, cache, ids, **more), added(layers, other, ids, **more)
            close(found.logits, expected.logits)
            assert (found.hidden_states is None) == (expected.hidden_states is None)
        assert runs == [0]


def test_a_mask_that_hides_nothing_and_positions_are_taken(pair: Any) -> None:
    _, fused, layers = pair
    for more in (
        {"attention_mask": torch.ones(1, 7, dtype=torch.long)},
        {"position_ids": torch.tensor([[3]])},
    ):
        cache, token = prefilled(layers, prompt()), prompt(1, 1)
        other = copy.deepcopy(cache)
        with counted(fused) as runs:
            found = added(fused, cache, token, **more)
        assert runs == [1]
        close(found.logits, added(layers, other, token, **more).logits)


def empty(model: Any, static: bool, room: int = 32) -> Any:
    if static:
        return transformers.StaticCache(config=model.config, max_cache_len=room)
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("keep", [0, 1, 2, 50])
def test_prompts_in_parts_are_native_runs(pair: Any, batch: int, static: bool, keep: int) -> None:
    _, fused, layers = pair
    cache, other = empty(fused, static), empty(layers, static)
    held = 0
    with counted(fused) as runs:
        for tokens in (9, 1, 4, 1, 1):
            ids = prompt(batch, tokens)
            found = added(fused, cache, ids, logits_to_keep=keep)
            expected = added(layers, other, ids, logits_to_keep=keep)
            close(found.logits, expected.logits)
            held += tokens
            assert int(cache.get_seq_length()) == int(other.get_seq_length()) == held
        assert runs == [5]
    assert_alike(cache, other)


def test_a_prompt_without_a_cache_gets_one(pair: Any) -> None:
    _, fused, layers = pair
    ids = prompt(2)
    with counted(fused) as runs:
        found = fused(input_ids=ids, use_cache=True, return_dict=True)
    assert runs == [1]
    assert type(found.past_key_values) is transformers.DynamicCache
    expected = layers(input_ids=ids, use_cache=True, return_dict=True)
    close(found.logits, expected.logits)
    close(found.past_key_values.layers[1].keys, expected.past_key_values.layers[1].keys)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_padding_in_front(pair: Any, cache: str) -> None:
    """Each sequence gets the logits that it gets by itself, and every call is native."""
    _, fused, layers = pair
    ids, mask = prompt(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[2, :7] = 0
    ids[mask == 0] = 0
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    options |= {} if cache == "dynamic" else {"cache_implementation": "static"}
    with counted(fused) as runs:
        found = fused.generate(ids, attention_mask=mask, **options)
    assert runs == [6]
    logits = torch.stack(found.logits, 1)
    assert torch.equal(logits.argmax(2), found.sequences[:, 9:])
    for row, count in enumerate((5, 9, 2)):
        alone = found.sequences[row : row + 1, 9 - count : -1]
        with torch.no_grad():
            expected = layers(input_ids=alone, use_cache=True, return_dict=True).logits
        close(logits[row : row + 1], expected[:, count - 1 :])


def test_rows_of_padding_are_those_of_the_layers(pair: Any) -> None:
    _, fused, layers = pair
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    ids = prompt(2)
    with counted(fused) as runs:
        found = added(fused, empty(fused, False), ids, attention_mask=mask)
    assert runs == [1]
    close(found.logits, added(layers, empty(layers, False), ids, attention_mask=mask).logits)


def test_an_eager_decoder_gives_padding_what_it_did(pair: Any) -> None:
    """Its mask of large numbers lets padding see all of it: that runs layer by layer."""
    float_model, _, _ = pair
    model = copy.deepcopy(float_model)
    model.set_attn_implementation("eager")
    data = [{"input_ids": prompt(2, n), "use_cache": False} for n in (7, 9, 5)]
    fused = x86quant.quantize(model, data, speed_check=False, progress=False, fuse_blocks=True)
    layers = x86quant.to_dynamic(model).eval()
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    ids, cache, other = prompt(2), empty(fused, False), empty(layers, False)
    with counted(fused) as runs:
        found = added(fused, cache, ids, attention_mask=mask)
        assert runs == [0]
        expected = added(layers, other, ids, attention_mask=mask)
        close(found.logits, expected.logits)
        more = torch.nn.functional.pad(mask, (0, 1), value=1)
        token = prompt(2, 1)
        found = added(fused, cache, token, attention_mask=more)
        assert runs == [1]
    close(found.logits, added(layers, other, token, attention_mask=more).logits)


def test_a_static_cache_goes_between_layers_and_native_runs(pair: Any) -> None:
    _, fused, layers = pair
    cache, other = empty(fused, True), empty(layers, True)
    odd = torch.zeros(1, 1, 1, 32, dtype=torch.bool)
    odd[..., :9] = True
    odd[..., 4] = False
    steps: list[tuple[torch.Tensor, dict[str, Any], int]] = [
        (prompt(1, 8), {"output_hidden_states": True}, 0),
        (prompt(1, 1), {"attention_mask": odd}, 0),
        (prompt(1, 1), {}, 1),
        (prompt(1, 2), {"output_hidden_states": True}, 1),
        (prompt(1, 1), {}, 2),
    ]
    with counted(fused) as runs:
        for ids, more, native in steps:
            found, expected = added(fused, cache, ids, **more), added(layers, other, ids, **more)
            close(found.logits, expected.logits)
            assert runs == [native]
        for kept in (cache, other):
            kept.reset()
        ids = prompt(1, 3)
        close(added(fused, cache, ids).logits, added(layers, other, ids).logits)
        assert runs == [3]
    twin = copy.deepcopy(cache)
    added(fused, cache, prompt(1, 1))
    assert int(twin.get_seq_length()) == 3
    assert not torch.equal(cache.layers[0].keys, twin.layers[0].keys)


def test_a_full_static_cache_is_refused_as_by_the_layers(pair: Any) -> None:
    _, fused, layers = pair
    for model in (fused, layers):
        cache = empty(model, True, room=7)
        added(model, cache, prompt())
        added(model, cache, prompt(1, 1))
        with pytest.raises((IndexError, RuntimeError)):
            added(model, cache, prompt(1, 1))


@pytest.mark.parametrize(
    "wrong", ["empty", "no batch", "negative", "beyond", "position", "int32", "float", "three"]
)
@pytest.mark.parametrize("held", [0, 6])
def test_bad_ids_are_refused_as_by_the_float_model(pair: Any, wrong: str, held: int) -> None:
    float_model, fused, layers = pair
    ids: torch.Tensor = prompt(2, 3)
    more: dict[str, Any] = {}
    if wrong == "empty":
        ids = ids[:, :0]
    elif wrong == "no batch":
        ids = ids[:0]
    elif wrong in ("negative", "beyond"):
        ids[1, 2] = -1 if wrong == "negative" else 60
    elif wrong == "position":
        more["position_ids"] = torch.full((2, 3), 1 << 20)
    elif wrong in ("int32", "float"):
        ids = ids.to(torch.int32 if wrong == "int32" else torch.float32)
    else:
        ids = ids[None]

    def call(model: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        cache = empty(model, False)
        if held:
            added(model, cache, torch.full((2, held), 7))
        return cache, added(model, cache, ids, **more)

    try:
        call(float_model)
    except Exception as error:  # whatever transformers raises
        with pytest.raises(type(error)):
            call(fused)
    else:
        close(call(fused)[1].logits, call(layers)[1].logits)


def test_a_call_that_fails_leaves_the_cache_as_it_was(pair: Any) -> None:
    _, fused, layers = pair
    cache = empty(fused, False)
    added(fused, cache, prompt())
    other = copy.deepcopy(cache)
    bad = prompt(1, 3)
    bad[0, 1] = 60
    with pytest.raises(IndexError):
        added(fused, cache, bad)
    assert cache.get_seq_length() == 6
    ids = prompt(1, 3)
    close(added(fused, cache, ids).logits, added(layers, other, ids).logits)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "wrong",
    ["heads", "size", "layers", "dtype", "batch", "mask", "square", "lengths", "float mask"],
)
def test_what_does_not_fit_is_refused_as_the_float_model_does(
    pair: Any, wrong: str, tokens: int
) -> None:
    float_model, fused, layers = pair

    def call(model: Any) -> Any:
        torch.manual_seed(0)
        cache = transformers.DynamicCache()
        heads, size, layers, batch, dtype = 2, 8, 2, 1, torch.float32
        heads = model.config.num_attention_heads if model.config.model_type == "gpt2" else heads
        heads, size = heads + (wrong == "heads"), size * (2 if wrong == "size" else 1)
        layers, batch = layers - (wrong == "layers"), batch + (wrong == "batch")
        dtype = torch.float64 if wrong == "dtype" else dtype
        for number in range(layers):
            length = 6 - (wrong == "lengths" and number == 1)
            held = torch.randn(2, batch, heads, length, size, dtype=dtype)
            cache.update(held[0], held[1], number)
        mask = torch.ones(1, 5 if wrong == "mask" else 6 + tokens, dtype=torch.long)
        if wrong == "square":
            mask = torch.ones(1, 1, tokens, 4, dtype=torch.bool)
        if wrong == "float mask":
            mask = torch.zeros(1, 1, tokens, 6 + tokens)
        ids = torch.tensor([[4, 5, 9]])[:, :tokens]
        return added(model, cache, ids, attention_mask=mask).logits

    with counted(fused) as runs:
        try:
            call(float_model)
        except Exception as error:  # whatever transformers raises
            with pytest.raises(type(error)):
                call(fused)
        else:
            close(call(fused), call(layers))
        assert runs == [0]


def test_a_changed_decoder_runs_as_it_is_now(pair: Any) -> None:
    _, fused, _ = pair
    model = copy.deepcopy(fused)
    cache, token = prefilled(model, prompt()), prompt(1, 1)
    before = added(model, copy.deepcopy(cache), token).logits
    head = model.lm_head
    head.weight_scale.mul_(2)
    with pytest.warns(x86quant.X86QuantWarning, match="changed after it was quantized"):
        after = added(model, cache, token).logits
    assert model.forward.token_step is None
    close(after, before * 2)


def test_copies_keep_it(pair: Any) -> None:
    _, fused, layers = pair
    model = copy.deepcopy(fused)
    cache, token = prefilled(layers, prompt()), prompt(1, 1)
    other = copy.deepcopy(cache)
    assert isinstance(model.forward, BlockGraphs)
    with counted(model) as runs:
        close(added(model, cache, token).logits, added(layers, other, token).logits)
    assert runs == [1]


def test_a_saved_decoder_keeps_it(pair: Any, tmp_path: Path) -> None:
    _, fused, _ = pair
    x86quant.save(fused, tmp_path / "decoder.xq")
    model = x86quant.load(tmp_path / "decoder.xq")
    cache, other = empty(model, False), empty(fused, False)
    with counted(model) as runs:
        for tokens in (5, 1, 1):
            ids = prompt(2, tokens)
            found, expected = added(model, cache, ids), added(fused, other, ids)
            assert torch.equal(found.logits, expected.logits)
            assert type(found) is type(expected)
    assert runs == [3]
    held = {x.data_ptr() for x in model.forward.token_step.compiled.buffers()}
    assert model.lm_head.int8_weight.data_ptr() in held  # once in the file, and in memory


def test_a_changed_decoder_is_saved_without_it(pair: Any, tmp_path: Path) -> None:
    _, fused, _ = pair
    model = copy.deepcopy(fused)
    model.lm_head.weight_scale.mul_(2)
    x86quant.save(model, tmp_path / "decoder.xq")
    loaded = x86quant.load(tmp_path / "decoder.xq")
    assert not isinstance(vars(loaded).get("forward"), BlockGraphs)


def test_inference_mode_and_what_follows_it(pair: Any) -> None:
    _, fused, layers = pair
    token = prompt(1, 1)
    with torch.inference_mode():
        cache = prefilled(layers, prompt())
        added(fused, cache, token)
    with counted(fused) as runs:
        added(fused, cache, token)
    assert runs == [1]
    assert cache.get_seq_length() == 8


def test_a_decoder_that_caches_only_when_told_to_returns_no_cache_unasked() -> None:
    class OnlyAsked(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        """As some decoders of transformers do, it does not look at ``config.use_cache``."""

        def forward(
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            use_cache: Any = None,
            logits_to_keep: Any = 0,
            **more: Any,
        ) -> Any:
            names = ("attention_mask", "position_ids", "past_key_values", "logits_to_keep")
            given = {name: x for name, x in locals().items() if name in names}
            return super().forward(input_ids, use_cache=bool(use_cache), **given, **more)

    model = OnlyAsked(decoder("llama", width=32, layers=2, vocabulary=60).config).eval()
    data = [{"input_ids": prompt(2, n)} for n in (7, 9, 5)]
    fused = x86quant.quantize(model, data, speed_check=False, progress=False, fuse_blocks=True)
    step = fused.forward.token_step
    for one in (step, read_token_step(*_written(step))):
        fused.forward.token_step = one
        with torch.no_grad():
            assert fused(input_ids=prompt()).keys() == model(input_ids=prompt()).keys()
            with counted(fused) as runs:
                assert fused(input_ids=prompt(), use_cache=True).past_key_values is not None
            assert runs == [1]


def _written(step: TokenStep) -> tuple[dict[str, Any], Any]:
    """What a file says of ``step``, and what reads the graph in it."""
    content = write_token_step(step, None, lambda *_: {})  # type: ignore[arg-type]
    return content, lambda _: Content(lambda _: step.compiled, whole=step.compiled)
