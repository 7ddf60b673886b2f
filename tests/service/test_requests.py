"""What is asked and what is answered: forms, limits, and errors that say what was wrong."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from typing import Any

import numpy as np
import pytest

from tests.service.asgi_calls import Answer, call
from tests.service.word_engine import MOST, WordEngine
from x86quant.errors import InvalidInputError
from x86quant.service import EncoderService, Limits, application, encoder_service

_LIMITS = Limits(body_bytes=2000, inputs=4)


def _ask(path: str, content: Any = None, task: str = "embed", **options: Any) -> Answer:
    service = EncoderService(WordEngine(task), _LIMITS)
    return asyncio.run(call(application(service), path, content, **options))


def _unit(*values: float) -> Any:
    return pytest.approx([v / math.sqrt(sum(x * x for x in values)) for v in values], rel=1e-6)


def test_embeddings_in_openais_form() -> None:
    found = _ask("/v1/embeddings", {"input": ["a bb", "ccc"], "model": "any", "user": "me"}).json()
    assert [one["embedding"] for one in found["data"]] == [_unit(2, 3, 1), _unit(1, 3, 1)]
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert (found["object"], found["model"]) == ("list", "words")
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    alone = _ask("/v1/embeddings", {"input": "a bb"}).json()
    assert alone["data"] == found["data"][:1]


def test_embeddings_as_bytes_and_their_first_numbers() -> None:
    asked = {"input": "a bb", "encoding_format": "base64"}
    (one,) = _ask("/v1/embeddings", asked).json()["data"]
    found = np.frombuffer(base64.b64decode(one["embedding"]), dtype="<f4")
    assert found.tolist() == _unit(2, 3, 1)
    (one,) = _ask("/v1/embeddings", {"input": "a bb", "dimensions": 2}).json()["data"]
    assert one["embedding"] == _unit(2, 3)
    cut = {"inputs": ["a bb", "ccc"], "dimensions": 2, "normalize": False}
    assert _ask("/embed", cut).json() == [[2, 3], [1, 3]]


def test_answers_are_the_same_without_orjson(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, Any]] = [
        ("/v1/embeddings", {"input": ["a bb", "ccc"]}),
        ("/embed", {"inputs": ["a bb", "ccc"], "dimensions": 2, "normalize": False}),
    ]
    for path, asked in cases:
        with_it = _ask(path, asked).json()
        with monkeypatch.context() as patch:
            patch.setattr(encoder_service, "orjson", None)
            without = _ask(path, asked).json()
        rows, wanted = (
            [x["embedding"] for x in found["data"]] if path != "/embed" else found
            for found in (without, with_it)
        )
        assert np.array_equal(np.float32(rows), np.float32(wanted))


@pytest.mark.parametrize(
    ("ids", "wanted"), [([1, 2], [(2, 3, 1)]), ([[1, 2], [3]], [(2, 3, 1), (1, 3, 1)])]
)
def test_tokens_may_be_given(ids: Any, wanted: Any) -> None:
    found = _ask("/v1/embeddings", {"input": ids}).json()["data"]
    assert [one["embedding"] for one in found] == [_unit(*one) for one in wanted]


def test_embeddings_in_teis_form() -> None:
    assert _ask("/embed", {"inputs": ["a bb"], "normalize": False}).json() == [[2, 3, 1]]
    assert _ask("/embed", {"inputs": "a bb"}).json() == [_unit(2, 3, 1)]
    asked = {"inputs": "a bb", "normalize": False, "prompt_name": "query"}
    assert _ask("/embed", asked).json() == [[3, 5, 1]]


def test_long_texts_are_shortened_if_asked() -> None:
    text = " ".join(["a"] * MOST + ["bb"])
    for path, name in (("/embed", "inputs"), ("/v1/embeddings", "input")):
        refused = _ask(path, {name: ["a", text]})
        assert refused.status == 413
        assert f"text 1 has {MOST + 1} tokens" in refused.body.decode()
    asked = {"inputs": text, "truncate": True, "normalize": False}
    assert _ask("/embed", asked).json() == [[MOST, MOST, 1]]
    asked["truncation_direction"] = "Left"
    assert _ask("/embed", asked).json() == [[MOST, MOST + 1, 1]]
    ids = {**asked, "inputs": [1] * MOST + [2]}
    assert _ask("/embed", ids).json() == [[MOST, MOST + 1, 1]]
    assert _ask("/embed", {"inputs": [1] * (MOST + 1)}).status == 413


def test_scores_in_teis_form() -> None:
    asked = {"query": "a", "texts": ["a", "bbbb", "cc"], "raw_scores": True}
    found = _ask("/rerank", asked, "rerank").json()
    assert found == [
        {"index": 1, "score": 1.0}, {"index": 2, "score": -1.0}, {"index": 0, "score": -2.0},
    ]  # fmt: skip
    asked = {**asked, "raw_scores": False, "return_text": True}
    found = _ask("/rerank", asked, "rerank").json()
    assert found[0] == {"index": 1, "score": pytest.approx(1 / (1 + math.exp(-1))), "text": "bbbb"}


def test_facts_health_and_numbers() -> None:
    assert _ask("/health").json() == {"status": "ok"}
    assert _ask("/info").json()["model"]["max_tokens"] == MOST

    async def run() -> str:
        app = application(EncoderService(WordEngine(), _LIMITS))
        await call(app, "/embed", {"inputs": ["a bb", "a"]})
        await call(app, "/embed", {"inputs": []})
        await call(app, "/etc/passwd")
        return (await call(app, "/metrics")).body.decode()

    text = asyncio.run(run())
    for line in (
        'x86quant_requests_total{route="/embed",status="200"} 1',
        'x86quant_requests_total{route="/embed",status="422"} 1',
        'x86quant_requests_total{route="other",status="404"} 1',
        "x86quant_tokens_total 3",
        "x86quant_queue_texts 0",
        'x86quant_batch_texts_bucket{le="2"} 1',
        'x86quant_batch_texts_bucket{le="1"} 0',
        "x86quant_request_seconds_count 3",
    ):
        assert f"\n{line}\n" in text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


_DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("path", "content", "status", "message"),
    [
        ("/embed", b'{"inputs": "\xff"}', 400, "not UTF-8 (byte 12)"),
        ("/embed", b"", 400, "not JSON"),
        ("/embed", b'{"inputs": "a"', 400, "not JSON"),
        ("/embed", b'{"inputs": [NaN]}', 400, "it holds NaN"),
        ("/embed", b'{"inputs": [' + b"1" * 1900 + b"]}", 422, "ids of tokens"),
        ("/embed", b'["a"]', 422, "must be a JSON object, not a list"),
        ("/embed", b"null", 422, "not null"),
        ("/embed", {}, 422, "lacks 'inputs'"),
        ("/embed", {"inputs": None}, 422, "lacks 'inputs'"),
        ("/embed", {"inputs": []}, 422, "'inputs' is empty"),
        ("/embed", {"inputs": ""}, 422, "'inputs' is empty"),
        ("/embed", {"inputs": ["a", ""]}, 422, "'inputs', number 1 is empty"),
        ("/embed", {"inputs": ["a", 1]}, 422, "'inputs', number 1 must be a text, not a number"),
        ("/embed", {"inputs": ["a", None]}, 422, "not null"),
        ("/embed", {"inputs": {"a": 1}}, 422, "must be a list, not an object"),
        ("/embed", {"inputs": [[]]}, 422, "number 0 is empty"),
        ("/embed", {"inputs": [1, True]}, 422, "ids of tokens"),
        ("/embed", {"inputs": [1000]}, 422, "from 0 to 999"),
        ("/embed", {"inputs": [-1]}, 422, "from 0 to 999"),
        ("/embed", {"inputs": [1.5]}, 422, "must be a text, not a number"),
        ("/embed", b'{"inputs": "\\ud800"}', 422, "holds what is no character"),
        ("/embed", {"inputs": ["a"] * 5}, 413, "holds 5 texts, and a request may hold 4"),
        ("/embed", {"inputs": "a " * 1000}, 413, "more than 2000 bytes"),
        ("/embed", {"inputs": "a", "truncate": "yes"}, 422, "'truncate' must be true or false"),
        ("/embed", {"inputs": "a", "truncation_direction": "Up"}, 422, "'Right' or 'Left'"),
        ("/embed", {"inputs": "a", "prompt_name": "x"}, 422, "the model has 'query'"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "from 1 to 3"),
        ("/embed", {"inputs": "a", "dimensions": True}, 422, "from 1 to 3"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "x"}, 400, "'float' or 'base64'"),
        ("/v1/embeddings", {"input": "a", "encoding_format": []}, 400, "'float' or 'base64'"),
        ("/embed", {"inputs": "boom"}, 500, "RuntimeError: boom was in it"),
        ("/embed", {"inputs": "nan"}, 500, "NaN or infinity"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 422, "words is no reranker"),
        ("/embed/", {"inputs": "a"}, 404, "there is no /embed/"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(path: str, content: Any, status: int, message: str) -> None:
    answer = _ask(path, content)
    assert answer.status == status, answer.body
    found = answer.json()["error"]
    if path.startswith("/v1/"):
        assert found["code"] == status
        assert found["type"] == "invalid_request_error"
        found = found["message"]
    assert message in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"texts": ["a"]}, "lacks 'query'"),
        ({"query": 1, "texts": ["a"]}, "'query' must be a text"),
        ({"query": "a"}, "lacks 'texts'"),
        ({"query": "a", "texts": "b"}, "'texts' must be a list, not a text"),
        ({"query": "a", "texts": [["b"]]}, "number 0 must be a text, not a list"),
        ({"query": "a", "texts": [1]}, "number 0 must be a text, not a number"),
    ],
)
def test_what_is_wrong_with_a_rerank_is_said(content: Any, message: str) -> None:
    answer = _ask("/rerank", content, "rerank")
    assert answer.status == 422
    assert message in answer.json()["error"]
    assert "POST to /rerank" in _ask("/embed", {"inputs": "a"}, "rerank").json()["error"]


def test_methods_and_bodies_are_checked() -> None:
    wrong = _ask("/embed")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert _ask("/health", b"{}").status == 405
    assert _ask("/embed", _DEEP, headers={}).status == 413
    for length in ("5000", "-1", "x", "1" * 5000):
        answer = _ask("/embed", b"{}", headers={"content-length": length})
        assert (answer.status, answer.headers["connection"]) == (413, "close")
    parts = [
        json.dumps({"inputs": "a"}).encode()[:4],
        b"",
        json.dumps({"inputs": "a"}).encode()[4:],
    ]
    assert _ask("/embed", parts=parts, headers={}).status == 200


def test_deep_json_is_refused() -> None:
    service = EncoderService(WordEngine(), Limits())
    answer = asyncio.run(call(application(service), "/embed", _DEEP))
    assert answer.status == 400


@pytest.mark.parametrize("name", ["body_bytes", "inputs", "batch_tokens", "waiting", "timeout_s"])
def test_limits_are_checked(name: str) -> None:
    for value in (0, -1, float("nan")):
        with pytest.raises(InvalidInputError, match=name):
            Limits(**{name: value})
