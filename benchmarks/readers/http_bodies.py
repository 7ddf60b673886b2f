"""Requests to the service of encoders: bodies, and what stands around them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.readers.changes import anything, json_changes
from benchmarks.readers.reader import Depth, Reader, WrongAnswerError
from tests.service.asgi_calls import call
from tests.service.word_engine import WordEngine
from x86quant.service import EncoderService, Limits, application

_SAMPLES: dict[str, list[Any]] = {
    "/v1/embeddings": [{"input": ["a bb", "c"], "encoding_format": "base64", "dimensions": 2}],
    "/embed": [
        {"inputs": "a bb c", "truncate": True, "normalize": False},
        {"inputs": [[1, 2], [3]], "prompt_name": "query"},
    ],
    "/rerank": [{"query": "a", "texts": ["b", "cc"], "raw_scores": True, "return_text": True}],
}
_STATUSES = {200: Depth.READ, 400: Depth.FIRST, 422: Depth.REFUSED, 413: Depth.REFUSED}


def _change(rng: random.Random, data: bytes) -> bytes:
    path, _, body = data.partition(b"\n")
    if rng.random() < 0.1:
        return path + b"\n" + anything(rng, body)
    changed = json_changes(rng, json.loads(body))
    return path + b"\n" + json.dumps(changed).encode("utf-8", "surrogatepass")


def http(folder: Path) -> Reader:
    """A path, and behind its line the body."""
    applications = {
        path: application(
            EncoderService(
                WordEngine("rerank" if path == "/rerank" else "embed"),
                Limits(body_bytes=1000, inputs=8),
            )
        )
        for path in _SAMPLES
    }
    loop = asyncio.new_event_loop()

    def read(data: bytes) -> Depth:
        path, _, body = data.partition(b"\n")
        app = applications[path.decode()]
        answer = loop.run_until_complete(call(app, path.decode(), body))
        if answer.status not in _STATUSES:
            raise WrongAnswerError(f"status {answer.status}: {answer.body[:200]!r}")
        if answer.status != 200 and not answer.json()["error"]:
            raise WrongAnswerError("an error without a word")
        return _STATUSES[answer.status]

    samples = [
        f"{path}\n{json.dumps(body)}".encode()
        for path, bodies in _SAMPLES.items()
        for body in bodies
    ]
    return Reader(samples, _change, read)
