"""Transformers' blocks become fused graphs, which answer as the layers one by one do."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import x86quant
from x86quant.capture.exported import ops_from_export
from x86quant.compiled import CompiledModule, block_graphs, watch
from x86quant.compiled.block_graphs import BlockGraphs
from x86quant.dynamic import to_dynamic
from x86quant.errors import X86QuantWarning
from x86quant.forms.call_form import CallForm
from x86quant.lowering.graph_tools import is_op, op_name
from x86quant.lowering.lower import lower_rows
from x86quant.profiling.recorder import record
from x86quant.quantization.graphs.fused_blocks import comparable, rows_left_float

Made = tuple[nn.Module, dict[str, Any]]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def ids(batch: int = 2, tokens: int = 12, masked: int = 4) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    if masked:
        mask[-1, -masked:] = 0
    return {"input_ids": torch.randint(5, 90, (batch, tokens)), "attention_mask": mask}


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
PIXELS = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
NO_CACHE = {"use_cache": False}


def bert(t: Any) -> Made:
    return t.BertModel(t.BertConfig(**SIZES)), ids()


def eager_bert(t: Any) -> Made:
    return t.BertModel(t.BertConfig(**SIZES, attn_implementation="eager")), ids()


def roberta(t: Any) -> Made:
    return t.RobertaModel(t.RobertaConfig(**SIZES)), ids()


def distilbert(t: Any) -> Made:
    config = t.DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=64, vocab_size=100)
    return t.DistilBertModel(config), ids()


def llama(t: Any) -> Made:
    config = t.LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=16)
    return t.LlamaModel(config), {**ids(), **NO_CACHE}


def qwen3(t: Any) -> Made:
    config = t.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16)
    return t.Qwen3Model(config), {**ids(), **NO_CACHE}


def gpt2(t: Any) -> Made:
    config = t.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0
    )
    return t.GPT2Model(config), {**ids(), **NO_CACHE}


def t5_encoder(t: Any) -> Made:
    config = t.T5Config(d_model=32, d_kv=16, num_layers=1, num_heads=2, d_ff=64, vocab_size=100)
    return t.T5EncoderModel(config), ids()


def clip_text(t: Any) -> Made:
    config = t.CLIPTextConfig(**SIZES, max_position_embeddings=32, bos_token_id=0, eos_token_id=99)
    return t.CLIPTextModel(config), ids()


def whisper_encoder(t: Any) -> Made:
    config = t.WhisperConfig(
        d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_layers=1, decoder_attention_heads=2, vocab_size=100, max_source_positions=8,
        num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = t.WhisperModel(config).encoder
    return model, {"input_features": torch.randn(2, 8, 16)}


def vit(t: Any) -> Made:
    config = t.ViTConfig(
        **{k: v for k, v in SIZES.items() if k != "vocab_size"}, image_size=16, patch_size=8
    )
    return t.ViTModel(config, add_pooling_layer=False), PIXELS


def swin(t: Any) -> Made:
    config = t.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4
    )
    return t.SwinModel(config, add_pooling_layer=False), PIXELS


def torch_encoder(_: Any) -> Made:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return model, {"src": torch.randn(2, 6, 32)}


def torchvision_vit(_: Any) -> Made:
    models = pytest.importorskip("torchvision").models
    model = models.VisionTransformer(16, 8, 1, 2, 32, 64)
    nn.init.normal_(model.heads.head.weight)
    return model, {"x": PIXELS["pixel_values"]}


POST_NORM = {"norm_rows": 1, "attention_rows": 1, "linear_rows_norm": 2, "linear_rows_rows": 1}
GATED = {"norm_rows": 1, "attention_rows": 1, "linear_rows_norm": 2, "gated_rows_rows": 1}
PRE_NORM = POST_NORM
#: For each model, how many of each fused op a layer of it has, with the norms around the layers.
FUSED: dict[Callable[[Any], Made], dict[str, int]] = {
    bert: POST_NORM,
    eager_bert: POST_NORM,
    roberta: POST_NORM,
    distilbert: POST_NORM,
    llama: {**GATED, "rotate": 2},
    qwen3: {**GATED, "norm_rows": 3, "rotate": 2},
    gpt2: PRE_NORM,
    t5_encoder: PRE_NORM,
    clip_text: PRE_NORM,
    whisper_encoder: PRE_NORM,
    vit: PRE_NORM,
    swin: {"norm_rows": 2, "attention_rows": 2, "linear_rows_norm": 4, "linear_rows_rows": 2},
    torch_encoder: {"attention_rows": 1, "linear_rows_norm": 2, "linear_rows_rows": 1},
    torchvision_vit: PRE_NORM,
}


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("make", FUSED, ids=lambda make: make.__name__)
def test_blocks_are_recognised(transformers: Any, make: Callable[[Any], Made]) -> None:
    model, given = make(transformers)
    layers = to_dynamic(model.eval())
    form, leaves = CallForm.of(layers, (), given)
    exported = ops_from_export(layers, form, leaves, free=make in (llama, gpt2))
    lowered, _ = lower_rows(exported.graph_module)
    found = collections.Counter(op_name(n) for n in lowered.graph.nodes if is_op(n))
    assert {
        name: found[name] for name in found if name not in ("linear_rows", "quantize_rows")
    } == (FUSED[make])
    assert found["linear_dynamic"] == 0
    with torch.no_grad():
        for expected, actual in zip(exported.graph_module(*leaves), lowered(*leaves), strict=True):
            noise = (actual - expected).square().mean() / expected.square().mean()
            assert noise < 2**-12  # attention may multiply in bfloat16, which has 8 bits


@contextlib.contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """Counts the calls that the graphs in ``model`` answer."""
    calls = [0]
    graphs = [g for m in model.modules() if isinstance(g := vars(m).get("forward"), BlockGraphs)]
    kept = [(graph.compiled, graph.compiled.run) for block in graphs for graph in block.graphs]
    for compiled, run in kept:

        def counting(inputs: Any, run: Any = run) -> Any:
            calls[0] += 1
            return run(inputs)

        vars(compiled)["run"] = counting
    yield calls
    for compiled, _ in kept:
        del vars(compiled)["run"]


def quantized(model: nn.Module, *batches: Any) -> Any:
    return x86quant.quantize(
        model, list(batches), fuse_blocks=True, speed_check=False, progress=False
    )


@pytest.fixture(scope="module")
def fused(transformers: Any) -> Any:
    torch.manual_seed(0)
    model, given = bert(transformers)
    return quantized(model, given, ids(3, 7, masked=0))


def by_layers(model: nn.Module, **given: Any) -> Any:
    with torch.no_grad():
        return type(model).forward(model, **given)


def close(actual: Any, expected: Any) -> None:
    for x, y in zip(actual.to_tuple(), expected.to_tuple(), strict=True):
        assert (x - y).square().mean() < 1e-3 * y.square().mean()


def without_mask(t: Any) -> Made:
    model, given = t5_encoder(t)
    return model, {"input_ids": given["input_ids"]}


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("make", [*FUSED, without_mask], ids=lambda make: make.__name__)
def test_fused_ops_run_natively(transformers: Any, make: Callable[[Any], Made]) -> None:
    model, given = make(transformers)
    fast = quantized(model.eval(), given)
    with torch.no_grad(), counted(fast) as calls:
        fast(**given)
    assert calls[0]
    graphs = [g for m in fast.modules() if isinstance(g := vars(m).get("forward"), BlockGraphs)]
    in_torch = [
        node
        for block in graphs
        for graph in block.graphs
        for node in graph.compiled.graph_module.graph.nodes
        if is_op(node) and "why" in node.meta
    ]
    assert [f"{node.name}: {node.meta['why']}" for node in in_torch] == []


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("tokens", [2, 7, 30])
@pytest.mark.parametrize("masked", [0, 1])
def test_any_batch_and_length(fused: Any, batch: int, tokens: int, masked: int) -> None:
    given = ids(batch, tokens, masked)
    with torch.no_grad(), counted(fused) as calls:
        actual = fused(**given)
    assert calls == [1]
    close(actual, by_layers(fused, **given))
    alone = {name: x[-1:] for name, x in given.items()}
    with torch.no_grad():
        close(fused(**alone), by_layers(fused, **alone))


def test_a_report_lists_the_steps_of_the_fused_graph(fused: Any, tmp_path: Path) -> None:
    given = ids(2, 7, 1)
    report = x86quant.report(fused, tmp_path / "r.html", kwargs=given, runs=2)
    assert any("attention" in layer.op for layer in report.layers)
    assert all(layer.microseconds is not None for layer in report.layers)
    assert report.facts["fused blocks"].startswith("the whole model: ")
    assert "fused blocks: the whole model" in report.summary()[2]
    by_layer = x86quant.report(type(fused)(fused.config).eval(), tmp_path / "r.html", kwargs=given)
    assert "fused blocks" not in by_layer.facts
    with torch.no_grad(), counted(fused) as calls:
        fused(**given)
    assert calls == [1], "reporting left the graphs in force"


def test_padding_does_not_reach_tokens(fused: Any) -> None:
    short = ids(1, 6, masked=0)
    padded = {name: nn.functional.pad(x, (0, 5)) for name, x in short.items()}
    with torch.no_grad():
        one, other = fused(**short)[0], fused(**padded)[0][:, :6]
    torch.testing.assert_close(one, other, rtol=0, atol=0.02 * one.abs().max().item())


def test_it_stays_the_model_it_was(fused: Any, transformers: Any) -> None:
    assert type(fused) is transformers.BertModel
    assert fused.config.hidden_size == 32
    assert "fused graphs: the whole model" in str(fused.quantization)
    assert "encoder.layer.0.attention.self.query.int8_weight" in fused.state_dict()
    with torch.no_grad():
        assert type(fused(**ids())).__name__ == "BaseModelOutputWithPoolingAndCrossAttentions"


def test_other_calls_run_layer_by_layer(fused: Any) -> None:
    fused, given = copy.deepcopy(fused), ids()  # transformers leaves hooks in it
    with torch.no_grad(), counted(fused) as calls:
        assert fused(**given, output_hidden_states=True).hidden_states is not None
        fused(input_ids=given["input_ids"])
        assert len(fused(**given, return_dict=False)) == 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fused(**given)
        with rows_left_float():
            fused(**given)
    assert calls == [0]
    with torch.no_grad(), counted(fused) as calls:
        fused(**given)
    assert calls == [1]


def test_copies_and_pickles_keep_their_graphs(fused: Any) -> None:
    given = ids()
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert vars(other)["forward"].module is other
        with torch.no_grad(), counted(other) as calls:
            close(other(**given), fused(**given))
        assert calls == [1]


def _replace(model: Any) -> None:
    layer = model.encoder.layer[0].output
    layer.dense = nn.Linear(64, 32)


def _write(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.weight.mul_(3)


def _load(model: Any) -> None:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["encoder.layer.0.output.dense.weight_scale"] *= 4
    model.load_state_dict(state)


def _configure(model: Any) -> None:
    model.config.output_hidden_states = True


def _set(model: Any) -> None:
    model.encoder.layer[0].output.LayerNorm.eps = 10.0


def _patch(model: Any) -> None:
    layer = model.encoder.layer[0].output.LayerNorm
    layer.forward = functools.partial(_doubled, layer)


def _doubled(layer: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return 2 * type(layer).forward(layer, x)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("change", [_replace, _write, _load, _configure, _set, _patch])
def test_a_changed_model_runs_as_it_is_now(
    fused: Any, change: Callable[[Any], None], called: bool
) -> None:
    model, given = copy.deepcopy(fused), ids()
    with torch.no_grad():
        before = fused(**given)
        if called:
            model(**given)
        change(model)
        with pytest.warns(X86QuantWarning, match="was changed after it was quantized"):
            after = model(**given)
        expected = by_layers(model, **given)
        assert len(after.to_tuple()) == len(expected.to_tuple())
        assert torch.equal(after[0], expected[0])
        assert change is _configure or not torch.equal(after[0], before[0])
        assert torch.equal(copy.deepcopy(model)(**given)[0], expected[0])


def test_hooks_see_the_layers(fused: Any) -> None:
    model, given = copy.deepcopy(fused), ids()
    for _ in range(2):
        layer = model.encoder.layer[0]
        handle = layer.register_forward_hook(lambda m, args, result: 2 * result)
        with torch.no_grad(), counted(model) as calls:
            hooked = model(**given)[0]
            assert torch.equal(hooked, by_layers(model, **given)[0])
            assert calls == [0]
            handle.remove()
            assert not torch.equal(model(**given)[0], hooked)
        assert calls == [1]


def test_a_thread_never_sees_half_a_look(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that comes while one looks at the attributes looks for itself."""
    settings = watch._settings
    seen: list[bool | None] = []

    def interrupted(config: object) -> Any:
        if not seen:
            seen.append(None)
            seen[0] = watched.holds() and not watched.wants_layers()
        return settings(config)

    watched = watch.ModuleWatch(copy.deepcopy(fused))
    monkeypatch.setattr(watch, "_settings", interrupted)
    assert watched.holds()
    assert seen == [True]


def test_training_mode_is_the_layers_own(fused: Any) -> None:
    model, given = copy.deepcopy(fused), ids()
    model.train()
    with torch.no_grad(), counted(model) as calls:
        model(**given)
        assert calls == [0]
        model.eval()
        model(**given)
        assert calls == [1]


@pytest.fixture(scope="module")
def windowed(transformers: Any) -> Any:
    """Two stages of Swin behind its convolution, and pictures for them."""
    found = pytest.importorskip("torchvision").models.swin_transformer.SwinTransformer
    torch.manual_seed(0)
    model = found([4, 4], 32, [2, 2], [2, 2], [3, 3], stochastic_depth_prob=0.0, num_classes=10)
    pictures = torch.randn(2, 3, 48, 48)
    return quantized(model.eval(), pictures), pictures


def test_windows_are_moved_without_leaving_native_code(windowed: Any) -> None:
    fast, pictures = windowed
    assert "fused graphs: the whole model" in str(fast.quantization)
    (graph,) = vars(fast)["forward"].graphs
    # The mean of all pixels is what torch computes, and the positions' biases, which are known.
    # What comes before is two segments: torch views the floats of the first convolution.
    assert len(graph.compiled.segments) == 3
    assert {node.op for node in graph.compiled.float_nodes} == {
        "adaptive_avg_pool2d.default", "expand.default"
    }  # fmt: skip
    steps, _ = record(graph.compiled, (pictures,))
    copies = [step for step in steps if step.op == "copy"]
    assert copies
    # Floats of features are moved nowhere but where four pixels are joined to one.
    floats = [step for step in copies if step.activation_bytes > 2 * math.prod(step.output)]
    assert [step.output[-1] for step in floats if step.output[-1] in (32, 64)] == [32] * 4


def test_static_parts_are_fused_with_what_is_between(windowed: Any) -> None:
    fast, pictures = windowed
    parts = [m for m in fast.modules() if isinstance(m, CompiledModule)]
    assert parts
    with torch.no_grad():
        by_parts = type(fast).forward(fast, pictures)
        assert (fast(pictures) - by_parts).square().mean() < 1e-3 * by_parts.square().mean()
    native = [part.runtime for part in parts]
    with comparable(fast.modules()):
        assert [part.runtime for part in parts] == [part.graph_module for part in parts]
    assert [part.runtime for part in parts] == native != [part.graph_module for part in parts]


def test_where_the_whole_cannot_be_traced_parts_are(transformers: Any) -> None:
    torch.manual_seed(0)
    model, given = llama(transformers)
    given = {**given, "use_cache": True}  # it returns an object of transformers' own
    found = quantized(model, given)
    assert "fused graphs: layers.0.mlp" in str(found.quantization)
    with torch.no_grad(), counted(found) as calls:
        result = found(**given)
    assert calls == [1]
    assert type(result.past_key_values).__name__ == "DynamicCache"


class _Odd(nn.Module):
    """What it does depends on values, so no graph can stand for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            return self.norm(x + self.b(self.a(x)))
        return self.norm(x - self.a(x))


def test_what_cannot_be_traced_stays_layer_by_layer() -> None:
    found = quantized(_Odd(), torch.randn(4, 16), torch.randn(4, 16))
    assert "fused graphs" not in str(found.quantization)
    assert not any("forward" in vars(m) for m in found.modules())


def test_small_models_are_not_traced_unless_asked(transformers: Any) -> None:
    model, given = bert(transformers)
    found = x86quant.quantize(model, [given], speed_check=False, progress=False)
    assert "forward" not in vars(found)


def test_a_saved_model_comes_back_with_its_graphs(fused: Any, tmp_path: Path) -> None:
    x86quant.save(fused, tmp_path / "bert.x86q")
    loaded = x86quant.load(tmp_path / "bert.x86q")
    assert type(loaded) is type(fused)
    for given in (ids(), ids(1, 9, masked=2)):
        with torch.no_grad(), counted(loaded) as calls:
            actual = loaded(**given)
            assert calls == [1]
            for x, y in zip(actual.to_tuple(), fused(**given).to_tuple(), strict=True):
                assert torch.equal(x, y)


@torch.library.custom_op("x86quant_tests::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@_twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _Foreign(nn.Module):
    """It calls an op that no file may hold, and some code that export does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Doubling()
        self.steps: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


class _Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.b(_twice(self.a(x))))


def test_graphs_without_a_form_in_a_file_are_left_out_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = quantized(_Foreign().eval(), torch.randn(4, 16), torch.randn(4, 16))
    assert "fused graphs" in str(found.quantization)
    x = torch.randn(4, 16)
    with (
        pytest.warns(X86QuantWarning, match="but not its code"),
        pytest.warns(X86QuantWarning, match="the layers one by one"),
    ):
        x86quant.save(found, tmp_path / "it.x86q", example_inputs=(x,))
    loaded = x86quant.load(tmp_path / "it.x86q", model=_Foreign())
    with torch.no_grad(), block_graphs.layers_alone(found):
        assert torch.equal(found(x), loaded(x))
    with torch.no_grad(), counted(found) as calls:
        found(x)
    assert calls == [1]  # its own graphs are there again


def test_a_changed_model_is_saved_as_it_is(fused: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(fused)
    _write(model)
    with pytest.warns(X86QuantWarning, match="was changed after it was quantized"):
        model(**ids())
    x86quant.save(model, tmp_path / "bert.x86q")
    loaded = x86quant.load(tmp_path / "bert.x86q")
    with torch.no_grad(), counted(loaded) as calls:
        assert torch.equal(loaded(**ids(1, 5, 0))[0].isnan().any(), torch.tensor(False))
        close(loaded(**(given := ids())), by_layers(model, **given))
    assert calls == [0]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(**given)[0] * 2
        return out


def test_tools_see_what_runs(fused: Any, tmp_path: Path) -> None:
    given = ids()
    explained = {choice.op for choice in x86quant.explain(fused)}
    assert explained >= {"linear_rows", "linear_rows_norm", "attention_rows", "linear_rows_rows"}
    layers = {choice.layer for choice in x86quant.explain(fused)}
    assert "encoder.layer.0.output.dense" in layers
    report = x86quant.assert_int8(fused, kwargs=given, allow=["x86quant::attention*"])
    assert collections.Counter(op.op for op in report.int8) == {
        "x86quant::linear_rows": 2,  # the pooler's too
        "x86quant::linear_rows_norm": 2,
        "x86quant::linear_rows_rows": 1,
    }
    with pytest.raises(x86quant.FloatOpsError, match="attention_rows"):
        x86quant.assert_int8(fused, kwargs=given)
    profiled = x86quant.profile(fused, (), kwargs=given, runs=2)
    assert {step.step.op for step in profiled} >= {"linear_rows_norm", "attention_rows"}
    wrapped = Around(fused)
    around = x86quant.profile(wrapped, (), kwargs=given, runs=2)
    assert [s.step.layer for s in around] == [f"inner.{s.step.layer}" for s in profiled]
    assert around.outside_us > 0
    assert "forward" in vars(fused)
    assert block_graphs.blocks_of(fused) is not None  # it still holds
    with pytest.raises(x86quant.InvalidInputError, match="layers run one by one"):
        x86quant.profile(fused, (), kwargs={"input_ids": given["input_ids"]})
    x86quant.report(fused, tmp_path / "page.html")
    assert "fused graphs" in (tmp_path / "page.html").read_text()
    x86quant.reroute(fused)
    with torch.no_grad():
        close(fused(**given), by_layers(fused, **given))
