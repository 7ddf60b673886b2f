"""What is loaded runs in native graphs, and only where they stand for the call."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.huggingface.small_models import (
    GPT2,
    TEXT,
    last_state,
    load_with,
    loaded_from,
    spread,
)
from x86quant.compiled.block_graphs import BlockGraphs
from x86quant.compiled.token_step import TokenStep
from x86quant.errors import InvalidInputError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many native runs there were so far."""
    counted = [0]

    def count(kind: type, name: str) -> None:
        found = getattr(kind, name)

        def counting(*args: Any) -> Any:
            answer = found(*args)
            counted[0] += answer is not None
            return answer

        monkeypatch.setattr(kind, name, counting)

    count(BlockGraphs, "graph_for")
    count(TokenStep, "answer")
    return counted


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    """A float classifier, its folder, and what is made of that while loading."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**TEXT, num_labels=3)
    model = spread(transformers.BertForSequenceClassification(config))
    folder: Path = tmp_path_factory.mktemp("classifier")
    model.save_pretrained(folder)
    return (
        model,
        folder,
        loaded_from(folder, "AutoModelForSequenceClassification", fuse_blocks=True),
    )


def _sentences(batch: int, tokens: int, given: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    all_of_it = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    return {name: all_of_it[name] for name in given.split()}


_ALL = "input_ids attention_mask token_type_ids"


def _near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Codes may fall on the other side of an edge: close in the mean."""
    assert actual.shape == expected.shape
    assert float((actual - expected).square().mean() / expected.square().mean()) < 1e-3


@torch.no_grad()
@pytest.mark.parametrize("given", [_ALL, "input_ids attention_mask", "input_ids"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 5), (2, 12), (4, 31)])
def test_an_encoder_is_native_whatever_a_tokenizer_gives(
    classifier: Any, runs: list[int], given: str, batch: int, tokens: int
) -> None:
    model, _, loaded = classifier
    sentences = _sentences(batch, tokens, given)
    found = loaded(**sentences).logits
    assert runs == [1]
    _near(found, x86quant.to_dynamic(model)(**sentences).logits)
    assert runs == [1]
    assert loaded.quantization.notes == ("blocks run as fused graphs: the whole model",)


@torch.no_grad()
def test_it_is_what_quantize_makes(classifier: Any, tmp_path: Path, runs: list[int]) -> None:
    model, _, loaded = classifier
    data = [_sentences(2, n, _ALL) for n in (9, 7, 12)]
    options = {"smooth_quant": False, "speed_check": False, "progress": False}
    quantized: Any = x86quant.quantize(model, data, fuse_blocks=True, **options)
    quantized.save_pretrained(tmp_path / "quantized")
    loaded.save_pretrained(tmp_path / "loaded")
    runs[0] = 0
    expected = quantized(**data[0]).logits
    for again in (
        loaded,
        copy.deepcopy(loaded),
        load_with(tmp_path / "loaded"),
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "quantized"),
    ):
        before = runs[0]
        assert torch.equal(again(**data[0]).logits, expected)
        assert runs[0] == before + 1
        assert again.state_dict().keys() == loaded.state_dict().keys()
    assert "forward" not in vars(load_with(tmp_path / "loaded", fuse_blocks=False))


@torch.no_grad()
def test_values_that_were_guessed_wrong_are_not_taken(
    classifier: Any, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the call is traced as it is."""
    from x86quant.quantization.tracing import filled_forms

    monkeypatch.setitem(filled_forms._VALUES, "token_type_ids", 1)
    model, folder, _ = classifier
    loaded = loaded_from(folder, "AutoModelForSequenceClassification", fuse_blocks=True)
    runs[0] = 0
    sentences = _sentences(3, 8, "input_ids attention_mask")
    found = loaded(**sentences).logits
    assert runs == [1]
    _near(found, x86quant.to_dynamic(model)(**sentences).logits)


@torch.no_grad()
def test_a_classifier_of_pictures_is_native(tmp_path: Path, runs: list[int]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, intermediate_size=48, image_size=24, patch_size=8)
    model = spread(transformers.ViTForImageClassification(config))
    model.save_pretrained(tmp_path)
    loaded = loaded_from(tmp_path, "AutoModelForImageClassification", fuse_blocks=True)
    runs[0] = 0
    for batch in (1, 3):
        pixels = torch.randn(batch, 3, 24, 24)
        found = loaded(pixels).logits
        _near(found, x86quant.to_dynamic(model)(pixels).logits)
    assert runs == [2]


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = spread(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)))
    folder: Path = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "gpt2", "compressed-tensors"])
def test_a_decoder_generates_natively(
    kind: str, request: pytest.FixtureRequest, runs: list[int], ids: torch.Tensor, tmp_path: Path
) -> None:
    if kind == "compressed-tensors":
        folder = request.getfixturevalue("w8a8_folder")
        loaded, layers = (load_with(folder, fuse_blocks=x) for x in (True, False))
    else:
        folder = request.getfixturevalue({"llama": "llama_folder"}.get(kind, "decoder_folder"))
        loaded, layers = (
            loaded_from(folder, "AutoModelForCausalLM", fuse_blocks=x) for x in (True, False)
        )
    loaded.save_pretrained(tmp_path)
    again = load_with(tmp_path)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0,
               "min_new_tokens": 8}  # fmt: skip
    runs[0] = 0
    expected = layers.generate(ids, **options)
    assert runs == [0]
    assert torch.equal(loaded.generate(ids, **options), expected)
    assert torch.equal(again.generate(ids, **options), expected)
    assert runs == [16]
    with torch.no_grad():
        for found in (loaded(ids), loaded(input_ids=ids, attention_mask=mask)):
            assert type(found.past_key_values) is transformers.DynamicCache
        assert runs == [18]
        _near(loaded(ids).logits, layers(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("folder", "kind"), [("bert_folder", "AutoModel"), ("decoder_folder", "AutoModelForCausalLM")]
)
def test_what_graphs_run_is_not_packed_by_its_layers_too(
    folder: str, kind: str, request: pytest.FixtureRequest, runs: list[int], ids: torch.Tensor
) -> None:
    loaded = loaded_from(request.getfixturevalue(folder), kind, fuse_blocks=True)
    runs[0] = 0
    loaded(input_ids=ids)
    assert runs == [1]
    layers = [m for m in loaded.modules() if isinstance(m, x86quant.DynamicLinear)]
    assert layers
    assert not any(layer._packed for layer in layers)


def test_small_models_are_not_traced_unless_asked(bert_folder: Path) -> None:
    for fuse_blocks in (False, "auto"):
        model = loaded_from(bert_folder, fuse_blocks=fuse_blocks)
        assert "forward" not in vars(model)
        assert model.quantization.line() == "dynamic int8, 13 layers"
    with pytest.raises(InvalidInputError, match="fuse_blocks must be True, False"):
        x86quant.X86QuantConfig(fuse_blocks="yes")


@torch.no_grad()
def test_what_was_changed_runs_as_it_is_now(
    classifier: Any, runs: list[int], ids: torch.Tensor
) -> None:
    loaded = copy.deepcopy(classifier[2])
    loaded(ids)
    runs[0] = 0
    seen: list[Any] = []
    hook = loaded.bert.encoder.layer[0].register_forward_hook(lambda *x: seen.append(x))
    loaded(ids)
    hook.remove()
    assert seen
    assert runs == [0]
    loaded.train()
    loaded(ids)
    loaded.eval()
    assert runs == [0]
    loaded(ids)
    assert runs == [1]
    layer = loaded.bert.encoder.layer[1].output
    layer.dense = nn.Sequential(layer.dense, nn.Identity())
    layer.dense[0].weight_scale *= 2
    with pytest.warns(x86quant.X86QuantWarning, match="quantize or load it again"):
        found = loaded(ids).logits
    assert runs == [1]
    other = copy.deepcopy(classifier[0])
    other.bert.encoder.layer[1].output.dense.weight.data *= 2
    _near(found, x86quant.to_dynamic(other)(ids).logits)


def test_models_whose_calls_are_not_known_stay_layer_by_layer(
    tmp_path: Path, ids: torch.Tensor
) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=60, decoder_start_token_id=0, **sizes)
    )
    model.save_pretrained(tmp_path)
    loaded = loaded_from(tmp_path, "AutoModelForSeq2SeqLM", fuse_blocks=True)
    assert "layers run one by one" in str(loaded.quantization)
    assert loaded.generate(ids, max_new_tokens=3).shape[0] == 2


def test_a_model_that_refuses_made_up_inputs_is_loaded_all_the_same(
    bert_folder: Path, monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("not these")

    with monkeypatch.context() as patched:
        patched.setattr(transformers.models.bert.modeling_bert.BertEncoder, "forward", refuse)
        loaded = loaded_from(bert_folder, fuse_blocks=True)
    assert loaded.quantization.notes == ("layers run one by one: ValueError: not these",)
    assert bool(torch.isfinite(last_state(loaded, ids)).all())
