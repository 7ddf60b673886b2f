"""X86QuantConfig: models of transformers quantized while they load, saved, and read back."""

from __future__ import annotations

import copy
import gc
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.compiled.block_graphs import BlockGraphs
from x86quant.compiled.token_step import TokenStep
from x86quant.errors import InvalidInputError, UnsupportedError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

_TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def _spread(model: nn.Module) -> Any:
    """``model`` with weights large enough for its layers to matter."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    return _spread(transformers.BertModel(transformers.BertConfig(**_TEXT)))


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return _spread(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA)))


@pytest.fixture(scope="module")
def bert_folder(bert: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bert")
    bert.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def int8_folder(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("int8")
    _loaded(bert_folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    return folder


def _loaded(folder: Path, kind: str = "AutoModel", **options: Any) -> Any:
    config = x86quant.X86QuantConfig(**options)
    return getattr(transformers, kind).from_pretrained(folder, quantization_config=config)


def _layers(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def _state(bert: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return bert(ids).last_hidden_state


# --- while loading ---------------------------------------------------------------------------


def test_it_equals_the_model_quantized_after_loading(
    bert: Any, bert_folder: Path, ids: torch.Tensor
) -> None:
    model = _loaded(bert_folder)
    assert not _layers(model, nn.Linear)
    assert len(_layers(model, x86quant.DynamicLinear)) == 13
    assert torch.equal(_state(model, ids), _state(x86quant.to_dynamic(bert), ids))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())


@pytest.mark.parametrize("fuse_blocks", [False, True])
def test_no_float_copy_of_a_weight_is_left(bert: Any, bert_folder: Path, fuse_blocks: bool) -> None:
    shapes = {tuple(m.weight.shape) for m in bert.modules() if isinstance(m, nn.Linear)}
    tables = [m.weight for m in bert.modules() if isinstance(m, nn.Embedding)]
    # Asked of its type: what stands for an object that is gone has no other answer than an error.
    before = {id(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
    model = _loaded(bert_folder, fuse_blocks=fuse_blocks)
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
    assert _layers(model, x86quant.DynamicLinear)


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
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**_TEXT)),
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
    return {k: (_spread(m), calls.get(k, {"input_ids": ids})) for k, m in kinds.items()}


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
    model = _loaded(tmp_path / "float", type(float_model).__name__, embeddings=embeddings)
    expected: Any = x86quant.to_dynamic(float_model, embeddings=embeddings)
    head = model.get_output_embeddings()
    assert isinstance(head, x86quant.DynamicLinear)
    table, wanted = model.get_input_embeddings(), expected.get_input_embeddings()
    assert type(table) is type(wanted)
    assert torch.equal(table.weight, wanted.weight)
    assert not _layers(model, nn.Linear)
    assert torch.equal(model(**call).logits, expected(**call).logits)
    model.save_pretrained(tmp_path / "loaded")
    expected.save_pretrained(tmp_path / "converted")
    for folder in ("loaded", "converted"):
        again = x86quant_load(tmp_path / folder)
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
    model = _loaded(tmp_path / "float", type(float_model).__name__)
    options = {"fuse_blocks": False, "speed_check": False, "progress": False}
    quantized: Any = x86quant.quantize(float_model, [call], **options)
    given = {name: x for name, x in call.items() if not name.startswith("decoder")}
    how = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = quantized.generate(**given, **how)
    assert expected.shape[1] >= 12
    assert torch.equal(model.generate(**given, **how), expected)
    model.save_pretrained(tmp_path / "int8")
    assert torch.equal(x86quant_load(tmp_path / "int8").generate(**given, **how), expected)


def test_only_the_table_is_left_of_a_tied_weight(
    tied_models: dict[str, Any], tmp_path: Path
) -> None:
    float_model, _ = tied_models["t5"]
    float_model.save_pretrained(tmp_path)
    shape = float_model.lm_head.weight.shape
    before = {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)}
    model = _loaded(tmp_path, "T5ForConditionalGeneration")
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
    model = _loaded(tmp_path / "float", "T5ForConditionalGeneration", embeddings=True,
                    modules_to_not_convert=["lm_head"])  # fmt: skip
    assert all(table.weight is model.lm_head.weight for table in _embeddings(model))
    changed: Any = x86quant.to_dynamic(
        float_model, embeddings=True, keep=lambda name, _: name.endswith("embed_tokens")
    )
    changed.save_pretrained(tmp_path / "int8")
    again = x86quant_load(tmp_path / "int8")
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
    model = _loaded(tmp_path)
    assert torch.equal(_state(model, ids), _state(x86quant.to_dynamic(half.float()), ids))
    assert model.dtype is model.config.dtype is torch.float32


def test_options(bert_folder: Path) -> None:
    assert len(_layers(_loaded(bert_folder, scheme="weight_only"), x86quant.WeightOnlyLinear)) == 13
    tables = _layers(_loaded(bert_folder, embeddings=True), x86quant.WeightOnlyEmbedding)
    assert len(tables) == 3
    for entry, left in (
        ("pooler.dense", 1),
        ("key", 2),
        ("encoder.layer.1", 6),
        ("BertSelfAttention", 6),
    ):
        model = _loaded(bert_folder, modules_to_not_convert=[entry])
        assert len(_layers(model, nn.Linear)) == left, entry


def test_the_head_stays_in_float_if_asked(llama_folder: Path) -> None:
    assert not _layers(_loaded(llama_folder, "AutoModelForCausalLM"), nn.Linear)
    model = _loaded(llama_folder, "AutoModelForCausalLM", modules_to_not_convert=["lm_head"])
    assert _layers(model, nn.Linear) == ["lm_head"]


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
        _loaded(bert_folder, modules_to_not_convert=["poler"])


def test_models_without_linears_are_refused(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    transformers.ResNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="ResNetModel has no linear"):
        _loaded(tmp_path)


def test_other_devices_are_refused() -> None:
    from x86quant.huggingface import X86HfQuantizer

    quantizer = X86HfQuantizer(x86quant.X86QuantConfig(), pre_quantized=False)
    for device_map in (None, "cpu", {"": torch.device("cpu")}, "auto"):
        quantizer.validate_environment(device_map=device_map)
    for elsewhere in ("cuda:0", {"": "cpu", "head": "disk"}):
        with pytest.raises(InvalidInputError, match="run on the CPU only"):
            quantizer.validate_environment(device_map=elsewhere)


def _changed(folder: Path, into: Path, change: Any) -> Path:
    """A copy of ``folder`` with ``change`` made to its tensors."""
    from safetensors.torch import load_file, save_file

    into.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_text((folder / "config.json").read_text())
    return into


def test_values_that_no_code_stands_for_are_refused(bert_folder: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["encoder.layer.1.output.dense.weight"][3, 5] = float("nan")

    folder = _changed(bert_folder, tmp_path / "nan", spoil)
    with pytest.raises(InvalidInputError, match=r"encoder\.layer\.1\.output\.dense.*NaN"):
        _loaded(folder)


def test_what_a_checkpoint_lacks_is_new_and_int8(bert_folder: Path, ids: torch.Tensor) -> None:
    """A head that is not in the checkpoint, and a missing bias, as in a float model."""
    model = _loaded(bert_folder, "AutoModelForSequenceClassification")
    assert isinstance(model.classifier, x86quant.DynamicLinear)
    assert not model.classifier.bias.any()
    assert bool(torch.isfinite(model(ids).logits).all())


def test_a_missing_bias_is_zero(bert_folder: Path, tmp_path: Path) -> None:
    name = "encoder.layer.0.output.dense"
    folder = _changed(bert_folder, tmp_path / "no_bias", lambda x: x.pop(f"{name}.bias"))
    model = _loaded(folder)
    assert not model.get_submodule(name).bias.any()


def test_wrong_shapes_are_reported_as_ever(bert_folder: Path, tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["pooler.dense.weight"] = tensors["pooler.dense.weight"][:5].clone()

    folder = _changed(bert_folder, tmp_path / "cut", cut)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        _loaded(folder)


# --- saved and read back ---------------------------------------------------------------------


def test_a_saved_model_is_the_same(bert_folder: Path, int8_folder: Path, ids: torch.Tensor) -> None:
    model, again = _loaded(bert_folder), transformers.AutoModel.from_pretrained(int8_folder)
    assert torch.equal(_state(model, ids), _state(again, ids))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert again.config.quantization_config == x86quant.X86QuantConfig()
    written = json.loads((int8_folder / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "x86quant"
    assert written["bits"] == 8
    assert written["scheme"] == "dynamic"
    sizes = [(x / "model.safetensors").stat().st_size for x in (int8_folder, bert_folder)]
    assert sizes[0] < 0.6 * sizes[1]


def test_any_options_and_shards_survive(llama_folder: Path, tmp_path: Path, ids: Any) -> None:
    options = {"scheme": "weight_only", "modules_to_not_convert": ["mlp"], "embeddings": True}
    model = _loaded(llama_folder, "LlamaForCausalLM", **options)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = x86quant_load(tmp_path)
    assert type(again) is transformers.LlamaForCausalLM
    assert again.config.quantization_config == x86quant.X86QuantConfig(**options)
    assert again.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def x86quant_load(folder: Path, **options: Any) -> Any:
    from x86quant.huggingface import load

    return load(folder, **options)


def test_another_class_takes_what_it_has(
    llama_folder: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    model = _loaded(llama_folder, "AutoModelForCausalLM")
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert len(_layers(base, x86quant.DynamicLinear)) == 14
    assert torch.equal(_state(base, ids), _state(model.model, ids))


def test_a_new_process_needs_one_import(int8_folder: Path, ids: torch.Tensor) -> None:
    """And ``import x86quant`` alone does not import transformers."""
    model = transformers.AutoModel.from_pretrained(int8_folder)
    code = (
        "import sys, torch, x86quant\n"
        "assert 'X86QuantConfig' in dir(x86quant) and 'transformers' not in sys.modules\n"
        "from x86quant.torchvision_import import import_torchvision; import_torchvision()\n"
        "import x86quant.huggingface\nfrom transformers import AutoModel\n"
        f"model = AutoModel.from_pretrained({str(int8_folder)!r})\n"
        f"print(float(model(torch.tensor({ids.tolist()})).last_hidden_state.double().sum()))"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert float(found.stdout.split()[-1]) == float(_state(model, ids).double().sum())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from x86quant import huggingface

    assert "X86QuantConfig" not in x86quant.__all__  # which `from x86quant import *` imports
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'x86quant\[huggingface\]'"):
        runpy.run_path(str(huggingface.__file__))


@pytest.mark.parametrize("weight_only", [False, True])
def test_models_quantized_later_are_saved_alike(
    weight_only: bool, bert: Any, tmp_path: Path, ids: torch.Tensor
) -> None:
    """By a config that says nothing, the int8 layers would come back with random weights."""
    kept = "encoder.layer.1.output.dense"
    model: Any = x86quant.to_dynamic(
        bert, weight_only=weight_only, embeddings=True, keep=lambda name, _: name == kept
    )
    model.save_pretrained(tmp_path / "folder")
    again = x86quant_load(tmp_path / "folder")
    assert _layers(again, nn.Linear) == [kept]
    assert torch.equal(_state(model, ids), _state(again, ids))
    assert not hasattr(bert.config, "quantization_config")
    x86quant.save(again, tmp_path / "model.x86q")
    loaded: Any = x86quant.load(tmp_path / "model.x86q")
    loaded.save_pretrained(tmp_path / "other")
    assert torch.equal(_state(x86quant_load(tmp_path / "other"), ids), _state(model, ids))


def test_layers_of_several_kinds_are_refused(bert: Any, tmp_path: Path) -> None:
    model: Any = x86quant.to_dynamic(bert)
    model.pooler.dense = x86quant.WeightOnlyLinear.from_float(bert.pooler.dense)
    model = x86quant.to_dynamic(model)
    with pytest.raises(InvalidInputError, match=r"which only x86quant\.save can write"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_missing_codes_are_refused(int8_folder: Path, tmp_path: Path) -> None:
    lost = "encoder.layer.0.output.dense.weight_scale"
    folder = _changed(int8_folder, tmp_path / "lost", lambda x: x.pop(lost))
    with pytest.raises(InvalidInputError, match=f"lacks 1 tensors of int8 layers: {lost}"):
        transformers.AutoModel.from_pretrained(folder)


def test_float_files_that_claim_to_be_int8_are_refused(bert_folder: Path, int8_folder: Path,
                                                       tmp_path: Path) -> None:  # fmt: skip
    folder = _changed(bert_folder, tmp_path / "float", lambda _: None)
    (folder / "config.json").write_text((int8_folder / "config.json").read_text())
    with pytest.raises(InvalidInputError, match="no int8 weights at all"):
        transformers.AutoModel.from_pretrained(folder)


def test_spoiled_scales_are_refused(int8_folder: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["pooler.dense.weight_scale"][0] = float("inf")

    with pytest.raises(InvalidInputError, match=r"pooler\.dense: weight_scale holds"):
        transformers.AutoModel.from_pretrained(_changed(int8_folder, tmp_path / "inf", spoil))


def test_load_says_what_is_no_int8_model(bert_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="holds a float model: give its from_pretrained"):
        x86quant_load(bert_folder)


# --- native graphs ---------------------------------------------------------------------------


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
    config = transformers.BertConfig(**_TEXT, num_labels=3)
    model = _spread(transformers.BertForSequenceClassification(config))
    folder: Path = tmp_path_factory.mktemp("classifier")
    model.save_pretrained(folder)
    return model, folder, _loaded(folder, "AutoModelForSequenceClassification", fuse_blocks=True)


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
        x86quant_load(tmp_path / "loaded"),
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "quantized"),
    ):
        before = runs[0]
        assert torch.equal(again(**data[0]).logits, expected)
        assert runs[0] == before + 1
        assert again.state_dict().keys() == loaded.state_dict().keys()
    assert "forward" not in vars(x86quant_load(tmp_path / "loaded", fuse_blocks=False))


@torch.no_grad()
def test_values_that_were_guessed_wrong_are_not_taken(
    classifier: Any, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the call is traced as it is."""
    from x86quant.quantization.tracing import filled_forms

    monkeypatch.setitem(filled_forms._VALUES, "token_type_ids", 1)
    model, folder, _ = classifier
    loaded = _loaded(folder, "AutoModelForSequenceClassification", fuse_blocks=True)
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
    model = _spread(transformers.ViTForImageClassification(config))
    model.save_pretrained(tmp_path)
    loaded = _loaded(tmp_path, "AutoModelForImageClassification", fuse_blocks=True)
    runs[0] = 0
    for batch in (1, 3):
        pixels = torch.randn(batch, 3, 24, 24)
        found = loaded(pixels).logits
        _near(found, x86quant.to_dynamic(model)(pixels).logits)
    assert runs == [2]


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = _spread(transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)))
    folder: Path = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "gpt2", "compressed-tensors"])
def test_a_decoder_generates_natively(
    kind: str, request: pytest.FixtureRequest, runs: list[int], ids: torch.Tensor, tmp_path: Path
) -> None:
    if kind == "compressed-tensors":
        folder = request.getfixturevalue("w8a8_folder")
        loaded, layers = (x86quant_load(folder, fuse_blocks=x) for x in (True, False))
    else:
        folder = request.getfixturevalue({"llama": "llama_folder"}.get(kind, "decoder_folder"))
        loaded, layers = (
            _loaded(folder, "AutoModelForCausalLM", fuse_blocks=x) for x in (True, False)
        )
    loaded.save_pretrained(tmp_path)
    again = x86quant_load(tmp_path)
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
    loaded = _loaded(request.getfixturevalue(folder), kind, fuse_blocks=True)
    runs[0] = 0
    loaded(input_ids=ids)
    assert runs == [1]
    layers = [m for m in loaded.modules() if isinstance(m, x86quant.DynamicLinear)]
    assert layers
    assert not any(layer._packed for layer in layers)


def test_small_models_are_not_traced_unless_asked(bert_folder: Path) -> None:
    for fuse_blocks in (False, "auto"):
        model = _loaded(bert_folder, fuse_blocks=fuse_blocks)
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
    loaded = _loaded(tmp_path, "AutoModelForSeq2SeqLM", fuse_blocks=True)
    assert "layers run one by one" in str(loaded.quantization)
    assert loaded.generate(ids, max_new_tokens=3).shape[0] == 2


def test_a_model_that_refuses_made_up_inputs_is_loaded_all_the_same(
    bert_folder: Path, monkeypatch: pytest.MonkeyPatch, ids: torch.Tensor
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("not these")

    with monkeypatch.context() as patched:
        patched.setattr(transformers.models.bert.modeling_bert.BertEncoder, "forward", refuse)
        loaded = _loaded(bert_folder, fuse_blocks=True)
    assert loaded.quantization.notes == ("layers run one by one: ValueError: not these",)
    assert bool(torch.isfinite(_state(loaded, ids)).all())


# --- compressed-tensors ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def w8a8_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint written by the package compressed-tensors itself."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    model = copy.deepcopy(llama)
    groups = {"group_0": preset_name_to_scheme("W8A8", ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            # Its codes reach -128.
            layer.weight_scale.data = layer.weight.detach().abs().amax(1, keepdim=True) / 127.5
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder: Path = tmp_path_factory.mktemp("w8a8")
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def test_codes_of_compressed_tensors_are_taken_as_they_are(
    w8a8_folder: Path, tmp_path: Path, ids: torch.Tensor
) -> None:
    from safetensors.torch import load_file

    model = x86quant_load(w8a8_folder)
    assert type(model) is transformers.LlamaForCausalLM
    stored = load_file(w8a8_folder / "model.safetensors")
    layers = _layers(model, x86quant.DynamicLinear)
    assert len(layers) == 14
    for name in layers:
        layer = model.get_submodule(name)
        assert torch.equal(layer.int8_weight, stored[f"{name}.weight"])
        assert torch.equal(layer.weight_scale, stored[f"{name}.weight_scale"].reshape(-1))
    lowest = min(int(model.get_submodule(name).int8_weight.min()) for name in layers)
    assert lowest == -128
    theirs = transformers.AutoModelForCausalLM.from_pretrained(w8a8_folder)
    with torch.no_grad():
        expected, found = theirs(ids).logits, model(ids).logits
    assert float((found - expected).norm() / expected.norm()) < 0.06
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(found, again(ids).logits)


def test_the_lowest_code_is_exact() -> None:
    """Codes of other quantizers reach -128, which ours do not."""
    torch.manual_seed(0)
    weight = torch.full((19, 70), -128, dtype=torch.int8)
    weight[::2, ::3] = 127
    scale, x = torch.rand(19) / 100, torch.randn(5, 70) + 1
    found = x86quant.DynamicLinear(weight, scale)(x)
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    step = (high - low) / 255
    zero = torch.round(-low / step)
    codes = (torch.round(x / step[:, None]) + zero[:, None]).clamp(0, 255)
    exact = (codes - zero[:, None]).double() @ weight.double().t()
    assert torch.allclose(found.double(), exact * step[:, None] * scale, rtol=1e-5, atol=1e-4)


W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                "dynamic": True,
            },
        }
    },
}  # fmt: skip


def _with(path: str, value: Any) -> dict[str, Any]:
    settings = copy.deepcopy(W8A8)
    *keys, last = path.split("/")
    inner = settings
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return settings


_GROUP = "config_groups/group_0"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{_GROUP}/format", "float-quantized", "stored as 'float-quantized'"),
        (f"{_GROUP}/weights/num_bits", 6, "weights are int6"),
        (f"{_GROUP}/weights/type", "float", "weights are float8"),
        (f"{_GROUP}/weights/strategy", "block", "scale by 'block'"),
        (f"{_GROUP}/weights/dynamic", True, "weights are not static"),
        (f"{_GROUP}/weights", None, "weights is None"),
        (f"{_GROUP}/input_activations/num_bits", 4, "input_activations are int4"),
        (f"{_GROUP}/input_activations/dynamic", False, "input_activations are not dynamic"),
        (f"{_GROUP}/input_activations/strategy", "tensor", "scale by 'tensor'"),
        (f"{_GROUP}/output_activations", {"num_bits": 8}, "quantized output_activations"),
        ("transform_config", {"config_groups": {"R1": {}}}, "transforms of weights"),
        ("sparsity_config", {"format": "sparse-bitmask"}, "'sparse-bitmask'"),
        ("config_groups", {"W8A8": ["Linear"]}, "preset"),
    ],
)
def test_other_formats_are_refused_in_a_sentence(path: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        x86quant.X86QuantConfig.from_others(_with(path, value))
    assert "\n" not in str(caught.value)
    assert "what can be read are weights of 4 or 8 bits" in str(caught.value)


def test_settings_of_others_are_refused() -> None:
    assert x86quant.X86QuantConfig.from_others(W8A8).checkpoint == "compressed-tensors"
    with pytest.raises(InvalidInputError, match="method 'other'"):
        x86quant.X86QuantConfig.from_others({"quant_method": "other"})
    with pytest.raises(InvalidInputError, match="have no config_groups"):
        x86quant.X86QuantConfig.from_others(_with("config_groups", {}))
