"""X86QuantConfig: models of transformers quantized while they load."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from tests.huggingface.small_models import (
    GPT2,
    TEXT,
    changed_copy,
    last_state,
    layers_of,
    load_with,
    loaded_from,
    spread,
)
from x86quant.errors import InvalidInputError, UnsupportedError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


def test_it_equals_the_model_quantized_after_loading(
    bert: Any, bert_folder: Path, ids: torch.Tensor
) -> None:
    model = loaded_from(bert_folder)
    assert not layers_of(model, nn.Linear)
    assert len(layers_of(model, x86quant.DynamicLinear)) == 13
    assert torch.equal(last_state(model, ids), last_state(x86quant.to_dynamic(bert), ids))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())


@pytest.mark.parametrize("fuse_blocks", [False, True])
def test_no_float_copy_of_a_weight_is_left(bert: Any, bert_folder: Path, fuse_blocks: bool) -> None:
    shapes = {tuple(m.weight.shape) for m in bert.modules() if isinstance(m, nn.Linear)}
    tables = [m.weight for m in bert.modules() if isinstance(m, nn.Embedding)]
    # Asked of its type: what stands for an object that is gone has no other answer than an error.
    # They are kept: what is freed gives its identity to what comes.
    before = {id(x): x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
    model = loaded_from(bert_folder, fuse_blocks=fuse_blocks)
    assert ("forward" in vars(model)) is fuse_blocks
    gc.collect()
    copies = [
        x
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, nn.Parameter)  # and not one that stands for sizes in a graph
        and id(x) not in before and x.is_floating_point() and tuple(x.shape) in shapes
        and not any(x.shape == table.shape for table in tables)
    ]  # fmt: skip
    assert not copies
    assert layers_of(model, x86quant.DynamicLinear)


def _tied_models() -> dict[str, Any]:
    """Models whose heads are their embeddings, with what they are called with."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    sounds = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(2))
    sizes = {"vocab_size": 60, "pad_token_id": 0, "decoder_start_token_id": 2}
    stacks = {"d_model": 32, **{
        f"{stack}_{name}": number
        for stack in ("encoder", "decoder")
        for name, number in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    }}  # fmt: skip
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    whisper = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 64,
               "suppress_tokens": None, "begin_suppress_tokens": None}  # fmt: skip
    torch.manual_seed(0)
    kinds = {
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
        "t5": transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **t5)),
        "bart": transformers.BartForConditionalGeneration(
            transformers.BartConfig(**sizes, **stacks, max_position_embeddings=64)
        ),
        "whisper": transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**sizes, **stacks, **whisper)
        ),
    }
    calls = {
        "whisper": {"input_features": sounds, "decoder_input_ids": ids},
        **{key: {"input_ids": ids, "decoder_input_ids": ids[:, :5]} for key in ("t5", "bart")},
    }
    for model in kinds.values():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # a tied one, too, which would begin as zeros
                parameter.data.normal_()
    return {k: (spread(m), calls.get(k, {"input_ids": ids})) for k, m in kinds.items()}


_TIED = ("gpt2", "bert", "t5", "bart", "whisper")


@pytest.fixture(scope="module")
def tied_models() -> dict[str, Any]:
    return _tied_models()


@torch.no_grad()
@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("kind", _TIED)
def test_a_tied_head_is_int8_and_its_table_stays(
    kind: str, embeddings: bool, tied_models: dict[str, Any], tmp_path: Path
) -> None:
    """As ``to_dynamic`` makes it; so it is saved, too."""
    float_model, call = tied_models[kind]
    float_model.save_pretrained(tmp_path / "float")
    model = loaded_from(tmp_path / "float", type(float_model).__name__, embeddings=embeddings)
    expected: Any = x86quant.to_dynamic(float_model, embeddings=embeddings)
    head = model.get_output_embeddings()
    assert isinstance(head, x86quant.DynamicLinear)
    table, wanted = model.get_input_embeddings(), expected.get_input_embeddings()
    assert type(table) is type(wanted)
    assert torch.equal(table.weight, wanted.weight)
    assert not layers_of(model, nn.Linear)
    assert torch.equal(model(**call).logits, expected(**call).logits)
    model.save_pretrained(tmp_path / "loaded")
    expected.save_pretrained(tmp_path / "converted")
    for folder in ("loaded", "converted"):
        again = load_with(tmp_path / folder)
        assert type(again) is type(float_model)
        state = again.state_dict()
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(x, state[name]) for name, x in expected.state_dict().items())
        assert torch.equal(again(**call).logits, expected(**call).logits)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart", "whisper"])
def test_models_with_tied_heads_generate_as_quantized_by_call(
    kind: str, tied_models: dict[str, Any], tmp_path: Path
) -> None:
    float_model, call = tied_models[kind]
    float_model.save_pretrained(tmp_path / "float")
    model = loaded_from(tmp_path / "float", type(float_model).__name__)
    options = {"fuse_blocks": False, "speed_check": False, "progress": False}
    quantized: Any = x86quant.quantize(float_model, [call], **options)
    given = {name: x for name, x in call.items() if not name.startswith("decoder")}
    how = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = quantized.generate(**given, **how)
    assert expected.shape[1] >= 12
    assert torch.equal(model.generate(**given, **how), expected)
    model.save_pretrained(tmp_path / "int8")
    assert torch.equal(load_with(tmp_path / "int8").generate(**given, **how), expected)


def test_only_the_table_is_left_of_a_tied_weight(
    tied_models: dict[str, Any], tmp_path: Path
) -> None:
    float_model, _ = tied_models["t5"]
    float_model.save_pretrained(tmp_path)
    shape = float_model.lm_head.weight.shape
    # They are kept: what is freed gives its identity to what comes.
    before = {id(x): x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
    model = loaded_from(tmp_path, "T5ForConditionalGeneration")
    gc.collect()
    tables = [
        x
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, nn.Parameter)
        and id(x) not in before
        and x.is_floating_point()
        and x.shape == shape
    ]
    assert len(tables) == 1
    assert all(table.weight is tables[0] for table in _embeddings(model)[:3])


def _embeddings(model: Any) -> list[Any]:
    return [model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens]


def test_ties_among_what_stays_float_are_kept(tied_models: dict[str, Any], tmp_path: Path) -> None:
    """A table whose head is to stay in float does, too; of three tables two stay one."""
    float_model, call = tied_models["t5"]
    float_model.save_pretrained(tmp_path / "float")
    model = loaded_from(tmp_path / "float", "T5ForConditionalGeneration", embeddings=True,
                    modules_to_not_convert=["lm_head"])  # fmt: skip
    assert all(table.weight is model.lm_head.weight for table in _embeddings(model))
    changed: Any = x86quant.to_dynamic(
        float_model, embeddings=True, keep=lambda name, _: name.endswith("embed_tokens")
    )
    changed.save_pretrained(tmp_path / "int8")
    again = load_with(tmp_path / "int8")
    shared, one, other = _embeddings(again)
    assert isinstance(shared, x86quant.dynamic.WeightOnlyEmbedding)
    assert type(one) is nn.Embedding
    assert one.weight is other.weight
    with torch.no_grad():
        assert torch.equal(again(**call).logits, changed(**call).logits)


def test_half_precision_weights_are_quantized_from_their_values(
    bert: Any, tmp_path: Path, ids: torch.Tensor
) -> None:
    half = copy.deepcopy(bert).bfloat16()
    half.save_pretrained(tmp_path)
    model = loaded_from(tmp_path)
    assert torch.equal(last_state(model, ids), last_state(x86quant.to_dynamic(half.float()), ids))
    assert model.dtype is model.config.dtype is torch.float32


def test_options(bert_folder: Path) -> None:
    assert (
        len(layers_of(loaded_from(bert_folder, scheme="weight_only"), x86quant.WeightOnlyLinear))
        == 13
    )
    tables = layers_of(loaded_from(bert_folder, embeddings=True), x86quant.WeightOnlyEmbedding)
    assert len(tables) == 3
    for entry, left in (
        ("pooler.dense", 1),
        ("key", 2),
        ("encoder.layer.1", 6),
        ("BertSelfAttention", 6),
    ):
        model = loaded_from(bert_folder, modules_to_not_convert=[entry])
        assert len(layers_of(model, nn.Linear)) == left, entry


def test_the_head_stays_in_float_if_asked(llama_folder: Path) -> None:
    assert not layers_of(loaded_from(llama_folder, "AutoModelForCausalLM"), nn.Linear)
    model = loaded_from(llama_folder, "AutoModelForCausalLM", modules_to_not_convert=["lm_head"])
    assert layers_of(model, nn.Linear) == ["lm_head"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "weight_bits must be 8 or 4, got 5"),
        ({"scheme": "static"}, "scheme must be 'dynamic' or 'weight_only'"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ({"embeddings": "yes"}, "embeddings must be True or False"),
        ({"load_in_8bit": True}, "has no option load_in_8bit; it has weight_bits"),
        ({"quant_method": "gptq"}, "is for the method 'x86quant'"),
        ({"checkpoint": "gguf"}, "checkpoint must be"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        x86quant.X86QuantConfig(**options)


def test_modules_that_are_not_there_are_refused(bert_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"no module 'poler'; did you mean pooler"):
        loaded_from(bert_folder, modules_to_not_convert=["poler"])


def test_models_without_linears_are_refused(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    transformers.ResNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="ResNetModel has no linear"):
        loaded_from(tmp_path)


def test_other_devices_are_refused() -> None:
    from x86quant.huggingface import X86HfQuantizer

    quantizer = X86HfQuantizer(x86quant.X86QuantConfig(), pre_quantized=False)
    for device_map in (None, "cpu", {"": torch.device("cpu")}, "auto"):
        quantizer.validate_environment(device_map=device_map)
    for elsewhere in ("cuda:0", {"": "cpu", "head": "disk"}):
        with pytest.raises(InvalidInputError, match="run on the CPU only"):
            quantizer.validate_environment(device_map=elsewhere)


def test_values_that_no_code_stands_for_are_refused(bert_folder: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["encoder.layer.1.output.dense.weight"][3, 5] = float("nan")

    folder = changed_copy(bert_folder, tmp_path / "nan", spoil)
    with pytest.raises(InvalidInputError, match=r"encoder\.layer\.1\.output\.dense.*NaN"):
        loaded_from(folder)


def test_what_a_checkpoint_lacks_is_new_and_int8(bert_folder: Path, ids: torch.Tensor) -> None:
    """A head that is not in the checkpoint, and a missing bias, as in a float model."""
    model = loaded_from(bert_folder, "AutoModelForSequenceClassification")
    assert isinstance(model.classifier, x86quant.DynamicLinear)
    assert not model.classifier.bias.any()
    assert bool(torch.isfinite(model(ids).logits).all())


def test_a_missing_bias_is_zero(bert_folder: Path, tmp_path: Path) -> None:
    name = "encoder.layer.0.output.dense"
    folder = changed_copy(bert_folder, tmp_path / "no_bias", lambda x: x.pop(f"{name}.bias"))
    model = loaded_from(folder)
    assert not model.get_submodule(name).bias.any()


def test_wrong_shapes_are_reported_as_ever(bert_folder: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["pooler.dense.weight"] = tensors["pooler.dense.weight"][:5].clone()

    folder = changed_copy(bert_folder, tmp_path / "cut", cut)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        loaded_from(folder)
