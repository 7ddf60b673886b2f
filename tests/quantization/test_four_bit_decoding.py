"""Decoders with weights of 4 bits as they are used: every cache, batches, prompts, streaming."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import x86quant

transformers = pytest.importorskip("transformers")

from benchmarks.greedy_agreement import decoder  # noqa: E402
from x86quant.huggingface.native_graphs import give_graphs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

_CACHES = ("dynamic", "static", "int8")


#: Layers in 8 bits: of products that read the same rows, and become one, some.
_WIDER = {"mixed": ("k_proj", "gate_proj"), "mixed gates": ("q_proj", "v_proj", "up_proj")}


@pytest.fixture(scope="module", params=["llama", "gpt2", *_WIDER])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A decoder of random weights in 4 bits, with native runs and layer by layer."""
    transformers.utils.logging.set_verbosity_error()
    wider = _WIDER.get(request.param, ())
    model = decoder("llama" if wider else request.param, width=64, layers=2, vocabulary=60)
    model = x86quant.to_dynamic(model, keep=lambda name, _: not name.endswith(wider))
    layers = x86quant.to_dynamic(model, weight_bits=4)
    fused = copy.deepcopy(layers)
    give_graphs(fused, True)
    linears = [m for m in fused.modules() if isinstance(m, x86quant.DynamicLinear)]
    assert sum(m.bits == 8 for m in linears) == 2 * len(wider)
    return fused, layers


def empty(kind: str, model: Any) -> Any:
    """A cache of a kind."""
    if kind == "int8":
        return x86quant.Int8Cache(model.config)
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=40)
    return transformers.DynamicCache(config=model.config)


def ids(batch: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 60, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("kind", _CACHES)
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_tokens_are_those_of_the_layers(
    pair: Any, kind: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, _ = pair
    step = fused.forward.token_step
    compiled, ran = step.on_codes if kind == "int8" else step.compiled, []
    run = compiled.run
    monkeypatch.setattr(compiled, "run", lambda given: (ran.append(1), run(given))[1])
    caches = [empty(kind, model) for model in pair]
    for number, tokens in enumerate((20, 1, 1, 5, 1)):
        some = ids(batch, tokens, number)
        found, wanted = (
            model(input_ids=some, past_key_values=cache, use_cache=True, return_dict=True).logits
            for model, cache in zip(pair, caches, strict=True)
        )
        # Codes of rows may fall on the other side of an edge: close in the mean.
        assert float((found - wanted).square().mean() / wanted.square().mean()) < 1e-3
    assert len(ran) == 5, "each call was one native run"


def test_what_generate_reads_may_be_set(pair: Any) -> None:
    """The token that pads, say: no forward reads it, so tokens stay one native run."""
    fused = copy.deepcopy(pair[0])
    fused(ids(1, 3, 0))
    fused.generation_config.pad_token_id = 7
    fused.generation_config.max_new_tokens = 3
    assert fused.forward.current()
    fused.config.vocab_size = 61
    assert not fused.forward.current()


def reordered(model: Any) -> Any:
    """``model`` with its linears but the head reading features in another order, as act-order."""
    found = copy.deepcopy(model)
    orders: dict[tuple[str, int], torch.Tensor] = {}
    draw = torch.Generator().manual_seed(0)
    for name, module in list(found.named_modules()):
        if not isinstance(module, x86quant.DynamicLinear) or "head" in name:
            continue
        parent, _, child = name.rpartition(".")
        # One order for the linears of an input, as they have one where data chose it.
        source = (
            "input" if child in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") else child
        )
        key = (f"{parent}.{source}", module.in_features)
        if key not in orders:
            orders[key] = torch.randperm(module.in_features, generator=draw)
        layer = x86quant.dynamic.ReorderedLinear(module, orders[key])
        setattr(found.get_submodule(parent), child, layer)
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "int8"])
def test_features_in_another_order_are_part_of_the_native_run(pair: Any, kind: str) -> None:
    layers = reordered(pair[1])
    fused = copy.deepcopy(layers)
    give_graphs(fused, True)
    step = fused.forward.token_step
    compiled = step.on_codes if kind == "int8" else step.compiled
    ran: list[int] = []
    run = compiled.run
    compiled.run = lambda x: (ran.append(1), run(x))[1]
    caches = [empty(kind, model) for model in (fused, layers)]
    for number, tokens in enumerate((20, 1, 4)):
        some = ids(2, tokens, number)
        found, wanted = (
            model(input_ids=some, past_key_values=cache, use_cache=True, return_dict=True).logits
            for model, cache in zip((fused, layers), caches, strict=True)
        )
        # Norms and attention may sum in another order: an edge of a code may lie in between.
        assert float((found - wanted).square().mean() / wanted.square().mean()) < 1e-3
    assert len(ran) == 3, "each call was one native run"
    steps = [one.op for segment in compiled.segments for one in segment.plans[-1].steps]
    # Of a layer: features of two norms, of the heads, and of what the MLP has between products.
    assert steps.count("reorder_codes") == 4 * 2
    assert not [node for node in compiled.float_nodes if "index_select" in node.op]


class _Tokens:
    """What is streamed, as ids: a streamer of generate."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.found += value.flatten().tolist()

    def end(self) -> None:
        pass


def test_caches_and_streaming_give_the_same_tokens(pair: Any) -> None:
    fused, _ = pair
    prompt = ids(1, 12, 7)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt), "max_new_tokens": 10, "do_sample": False
    }  # fmt: skip
    streamed = _Tokens()
    wanted = fused.generate(prompt, streamer=streamed, **options)
    assert streamed.found == wanted[0].tolist()
    assert torch.equal(fused.generate(prompt, cache_implementation="static", **options), wanted)
    # Layer by layer; of random weights the best two logits come near each other at some token.
    found = fused.generate(prompt, use_cache=False, **options)
    assert torch.equal(found[:, :17], wanted[:, :17])


@torch.no_grad()
def test_a_prompt_of_512(pair: Any) -> None:
    fused, _ = pair
    most = fused.config.max_position_embeddings
    prompt = ids(1, min(512, most), 8)
    found, wanted = (model(input_ids=prompt, logits_to_keep=1).logits for model in pair)
    assert float(torch.cosine_similarity(found.flatten(), wanted.flatten(), 0)) > 0.999


def test_the_summary_tells_the_perplexity() -> None:
    model = decoder("llama", width=64, layers=2, vocabulary=60)
    given = ids(1, 9, 1)  # the same again and again: which are judged does not matter
    mask = torch.ones_like(given)
    mask[0, :3] = 0
    data = [{"input_ids": given, "attention_mask": mask, "use_cache": False}] * 4
    ours = x86quant.quantize(model, data, weight_bits=4, speed_check=False, progress=False)
    told = ours.quantization.perplexity
    follows = mask[:, 1:].bool()
    follows[0, :3] = False
    for found, net in zip(told, (ours, model), strict=True):
        with torch.no_grad():
            logits = net(**data[0]).logits[:, :-1][follows]
        loss = torch.nn.functional.cross_entropy(logits, given[:, 1:][follows])
        assert found == pytest.approx(float(loss.exp()), rel=1e-3)
    assert "perplexity" in str(ours.quantization)
