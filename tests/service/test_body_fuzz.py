"""Bodies that a program made up: each is answered, and by an error that is in the table."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from tests.service.asgi_calls import call
from tests.service.word_engine import WordEngine
from x86quant.service import EncoderService, Limits, application

_SAMPLES: dict[str, list[Any]] = {
    "/v1/embeddings": [{"input": ["a bb", "c"], "encoding_format": "base64", "dimensions": 2}],
    "/embed": [
        {"inputs": "a bb c", "truncate": True, "normalize": False},
        {"inputs": [[1, 2], [3]]},
    ],
    "/rerank": [{"query": "a", "texts": ["b", "cc"], "raw_scores": True, "return_text": True}],
}
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**70, 1.5, 1e308, "", "a", "a " * 40, "\ud800", "\0", "é漢😀",
    [], [[]], {}, [None], ["a", 1], [1, "a"], [[1], "a"], [1e999], "Left", "base64", "query",
]  # fmt: skip
_ROUNDS = 3000


def _changed(value: Any, rng: random.Random) -> Any:
    """``value`` with one thing in it another."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice([*value])
        kind = rng.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != name}
        if kind < 0.25:
            return {
                **value,
                rng.choice(["inputs", "input", "query", "prompt_name"]): rng.choice(_VALUES),
            }
        return {**value, name: _changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.6:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value * rng.choice((2, 5, 50))
        return [*value[:place], _changed(value[place], rng), *value[place + 1 :]]
    return rng.choice(_VALUES)


def _body(sample: Any, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(3)):
        sample = _changed(sample, rng)
    body = bytearray(json.dumps(sample).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.3:  # most bytes spoil the JSON, which is the first check
        for _ in range(rng.randrange(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(body)


def test_made_up_bodies_are_all_answered() -> None:
    rng = random.Random(0)
    statuses: dict[str, list[int]] = {}

    async def run() -> None:
        limits = Limits(body_bytes=1000, inputs=8)
        for path, samples in _SAMPLES.items():
            task = "rerank" if path == "/rerank" else "embed"
            app = application(EncoderService(WordEngine(task), limits))
            for _ in range(_ROUNDS // len(_SAMPLES)):
                answer = await call(app, path, _body(rng.choice(samples), rng))
                assert answer.status in (200, 400, 413, 422), answer
                found = answer.json()
                assert answer.status == 200 or found["error"]
                statuses.setdefault(path, []).append(answer.status)
            assert (await call(app, "/health")).status == 200

    asyncio.run(run())
    for path, found in statuses.items():  # a fuzz whose bodies all fail at once would test nothing
        assert found.count(200) > len(found) / 5, path
        if path.startswith("/v1/"):  # 400 stands for both
            assert found.count(400) < len(found) / 1.5, path
            assert found.count(422) == 0, path
        else:
            assert found.count(400) < len(found) / 3, path
            assert found.count(422) > len(found) / 10, path
        assert found.count(413) > 0, path
