"""Folders as engines: the same numbers as the model's own methods, and folders that are refused."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import x86quant
from tests.service.asgi_calls import call
from tests.tiny_encoder import WORDS, write_tiny_encoder
from x86quant.errors import InvalidInputError, UnsupportedError
from x86quant.service import EncoderService, TokenRow, application, load_engine
from x86quant.service.text_tokens import padded

pytest.importorskip("transformers")
library = pytest.importorskip("sentence_transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

_TEXTS = [" ".join(WORDS[i : i + 3 + i % 5]) for i in range(len(WORDS))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_encoder(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    return write_tiny_encoder(folder, "BertForSequenceClassification", num_labels=1)


def _ask(engine: Any, path: str, content: Any) -> Any:
    answer = asyncio.run(call(application(EncoderService(engine)), path, content))
    assert answer.status == 200, answer.body
    return answer.json()


def test_a_plain_encoder_gives_what_encode_gives(plain: Path) -> None:
    engine = load_engine(plain, threads=1, name="tiny")
    model = engine._model
    assert (engine.facts.name, engine.facts.task, engine.facts.dtype) == ("tiny", "embed", "int8")
    assert (engine.facts.dimensions, engine.facts.max_tokens) == (32, 64)
    found = _ask(engine, "/embed", {"inputs": _TEXTS, "normalize": False})
    assert np.allclose(found, model.encode(_TEXTS), atol=1e-5)
    unit = _ask(engine, "/v1/embeddings", {"input": _TEXTS})["data"]
    wanted = model.encode(_TEXTS, normalize_embeddings=True)
    assert np.allclose([one["embedding"] for one in unit], wanted, atol=1e-5)


def test_long_texts_are_shortened_as_the_model_does(plain: Path) -> None:
    engine = load_engine(plain, threads=1)
    text = " ".join(WORDS * 9)
    found = _ask(
        engine, "/embed", {"inputs": [text, "a cat"], "truncate": True, "normalize": False}
    )
    assert np.allclose(found, engine._model.encode([text, "a cat"]), atol=1e-5)
    end = _ask(
        engine, "/embed",
        {"inputs": text, "truncate": True, "truncation_direction": "Left", "normalize": False},
    )  # fmt: skip
    last = engine._model.encode([" ".join((WORDS * 9)[-62:])])
    assert np.allclose(end, last, atol=1e-5)


def test_tokens_are_taken_as_they_are(plain: Path) -> None:
    engine = load_engine(plain, threads=1)
    ids = [list(row.ids) for row in engine.tokenize(_TEXTS[:3])]
    found = _ask(engine, "/embed", {"inputs": ids, "normalize": False})
    assert np.allclose(found, engine._model.encode(_TEXTS[:3]), atol=1e-5)


def test_a_reranker_gives_what_predict_gives(reranker: Path) -> None:
    engine = load_engine(reranker, threads=1)
    assert engine.facts.task == "rerank"
    asked = {"query": "a cat sat", "texts": _TEXTS, "return_text": True}
    found = _ask(engine, "/rerank", asked)
    wanted = engine._model.predict(
        [("a cat sat", text) for text in _TEXTS], activation_fn=torch.sigmoid
    )
    assert [one["index"] for one in found] == np.argsort(-wanted, kind="stable").tolist()
    for one in found:
        assert one["score"] == pytest.approx(float(wanted[one["index"]]), abs=1e-5)
        assert one["text"] == _TEXTS[one["index"]]


def test_an_int8_folder_with_prompts_is_served(plain: Path, tmp_path: Path) -> None:
    importlib.import_module("x86quant.sentence_transformers")
    model = library.SentenceTransformer(
        str(plain), device="cpu", backend="x86quant", prompts={"query": "the hills "}
    )
    model.default_prompt_name = "query"
    model.save_pretrained(str(tmp_path))
    engine = load_engine(tmp_path, threads=1)
    assert engine.facts.prompts == {"query": "the hills "}
    found = _ask(engine, "/embed", {"inputs": _TEXTS, "normalize": False})
    assert np.allclose(found, model.encode(_TEXTS), atol=1e-5)
    assert not np.allclose(found, model.encode(_TEXTS, prompt=""), atol=1e-3)


def test_shapes_are_few_where_padding_is_not_computed(plain: Path, tmp_path: Path) -> None:
    importlib.import_module("x86quant.sentence_transformers")
    config = x86quant.X86QuantConfig(fuse_blocks=True)
    model = library.SentenceTransformer(
        str(plain), device="cpu", backend="x86quant",
        model_kwargs={"quantization_config": config},
    )  # fmt: skip
    model.max_seq_length = 60
    model.save_pretrained(str(tmp_path))
    assert load_engine(plain, threads=1).facts.pads  # so few weights get no graphs
    engine = load_engine(tmp_path, threads=1)
    assert not engine.facts.pads
    shapes = set()
    for count in (1, 2, 5, 7):
        for words in (3, 8, 20, 50, 58):
            texts = [" ".join((WORDS * 4)[place : place + words]) for place in range(count)]
            rows = engine.tokenize(texts)
            shapes.add(engine.shape_for(rows))
            assert np.allclose(engine.run(rows), model.encode(texts), atol=1e-5)
    assert shapes == {(a, b) for a in (1, 2, 6, 8) for b in (16, 32, 60)}


def test_a_reranker_leaves_padding_out(reranker: Path, tmp_path: Path) -> None:
    importlib.import_module("x86quant.sentence_transformers")
    config = x86quant.X86QuantConfig(fuse_blocks=True)
    model = library.CrossEncoder(
        str(reranker), device="cpu", backend="x86quant",
        model_kwargs={"quantization_config": config},
    )  # fmt: skip
    model.save_pretrained(str(tmp_path))
    engine = load_engine(tmp_path, threads=1)
    assert not engine.facts.pads
    pairs = list(zip(_TEXTS, reversed(_TEXTS), strict=True))
    wanted = model.predict(pairs, activation_fn=torch.nn.Identity())
    found = engine.run(engine.tokenize(pairs))
    assert engine.shape_for(engine.tokenize(pairs)) == (16, 16)
    assert np.allclose(found[:, 0], wanted, atol=1e-5)


def test_rows_beyond_those_given_have_one_token() -> None:
    found = padded([TokenRow([5, 6]), TokenRow([7], [1])], 9, (3, 4))
    assert found["input_ids"].tolist() == [[5, 6, 9, 9], [7, 9, 9, 9], [9, 9, 9, 9]]
    assert found["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert found["token_type_ids"].tolist() == [[0] * 4, [1, 0, 0, 0], [0] * 4]


def test_folders_that_cannot_be_served_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is no folder"):
        load_engine("sentence-transformers/all-MiniLM-L6-v2")
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        load_engine(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidInputError, match="is not JSON"):
        load_engine(tmp_path)
    sparse = tmp_path / "sparse"
    shutil.copytree(plain, sparse)
    (sparse / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    with pytest.raises(UnsupportedError, match="holds a SparseEncoder"):
        load_engine(sparse)
    labels = write_tiny_encoder(
        _made(tmp_path / "l"), "BertForSequenceClassification", num_labels=3
    )
    with pytest.raises(UnsupportedError, match="3 labels"):
        load_engine(labels)


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def test_no_code_of_a_folder_runs(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for name in ("custom.py", "modeling_custom.py"):
        (folder / name).write_text(f"{trap}class Custom: pass\n")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "custom.Custom"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        load_engine(folder)
    (folder / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_custom.Custom", "AutoConfig": "custom.Custom"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "custom"}))
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        load_engine(folder)
    assert not (tmp_path / "ran").exists()
