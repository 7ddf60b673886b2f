"""``EncoderService``: a request in, an answer out, whatever carries them."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

import numpy as np

try:  # several times as fast as json, and what it writes of float32 is half as long
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

from x86quant.service import request_forms
from x86quant.service.batcher import (
    Batcher,
    EngineFailedError,
    QueueFullError,
    WaitedTooLongError,
)
from x86quant.service.engine import Engine, EngineFacts, Text, TokenRow
from x86quant.service.limits import Limits
from x86quant.service.metrics import CONTENT_TYPE, Metrics
from x86quant.service.request_forms import EmbedRequest, Input, RefusedError
from x86quant.version import __version__

#: What errors are called, as text-embeddings-inference calls them.
_ERROR_TYPES = {
    429: "Overloaded",
    500: "Backend",
    503: "Unhealthy",
}
_RETRY_AFTER = {429: "1", 503: "2"}


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """An answer of HTTP."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class EncoderService:
    """Answers requests for embeddings or scores by an engine.

    Attributes:
        limits: how much it takes on.
        draining: whether it is about to end: what waits is computed, nothing new is taken.
    """

    def __init__(self, engine: Engine, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.draining = False
        self._engine = engine
        self._metrics = Metrics()
        self._batcher = Batcher(engine, self.limits, self._metrics)
        # A thread of its own: long texts take long, and tokenizers are for one thread at a time.
        self._tokenizing = ThreadPoolExecutor(1, "x86quant-tokenizer")
        self._routes: dict[str, tuple[str, _Handler]] = {
            "/v1/embeddings": ("POST", self._openai_embeddings),
            "/embed": ("POST", self._embed),
            "/rerank": ("POST", self._rerank),
            "/health": ("GET", self._health),
            "/info": ("GET", self._info),
            "/metrics": ("GET", self._numbers),
        }

    async def answer(self, method: str, path: str, body: bytes) -> Reply:
        """The answer to a request; if this is cancelled, its texts leave the queue."""
        started = time.monotonic()
        try:
            reply = await self._answered(method, path, body)
        except RefusedError as error:
            reply = self.refusal(path, error)
        except QueueFullError as error:
            reply = self.refusal(path, RefusedError(429, str(error)))
        except WaitedTooLongError as error:
            reply = self.refusal(path, RefusedError(503, str(error)))
        except EngineFailedError as error:
            reply = self.refusal(path, RefusedError(500, str(error)))
        self.count(path, reply, time.monotonic() - started)
        return reply

    def count(self, path: str, reply: Reply, seconds: float) -> None:
        """Count ``reply``, which was ready after ``seconds``."""
        self._metrics.answered(path if path in self._routes else "other", reply.status, seconds)

    def refusal(self, path: str, error: RefusedError) -> Reply:
        """An error in the form that clients of ``path`` know."""
        kind, status = _ERROR_TYPES.get(error.status, "Validation"), error.status
        if path.startswith("/v1/"):
            if status in (400, 422):  # one and the same to OpenAI's clients
                kind, status = "invalid_request_error", 400
            found: Any = {"message": str(error), "type": kind, "param": None, "code": status}
            body = {"error": found}
        else:
            body = {"error": str(error), "error_type": kind}
        headers = {}
        if error.status in _RETRY_AFTER:
            headers["retry-after"] = _RETRY_AFTER[error.status]
        if error.status == 405:
            headers["allow"] = self._routes[path][0]
        return Reply(status, json.dumps(body).encode(), headers=headers)

    async def _answered(self, method: str, path: str, body: bytes) -> Reply:
        if path not in self._routes:
            raise RefusedError(404, f"there is no {path}; there are {', '.join(self._routes)}")
        wanted, handler = self._routes[path]
        if method != wanted:
            raise RefusedError(405, f"{path} takes {wanted}, not {method}")
        if self.draining and method == "POST":
            raise RefusedError(503, "the service is about to end and takes nothing new")
        return await handler(body)

    # --- routes ---

    async def _openai_embeddings(self, body: bytes) -> Reply:
        facts = self._facts("embed")
        request = request_forms.openai_embeddings(body, facts, self.limits)
        found, tokens = await self._embeddings(request)
        written = [_base64(row) if request.base64 else row for row in found]
        data = [
            {"object": "embedding", "index": place, "embedding": one}
            for place, one in enumerate(written)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _json({"object": "list", "data": data, "model": facts.name, "usage": usage})

    async def _embed(self, body: bytes) -> Reply:
        request = request_forms.tei_embed(body, self._facts("embed"), self.limits)
        found, _ = await self._embeddings(request)
        return _json(found)

    async def _rerank(self, body: bytes) -> Reply:
        request = request_forms.tei_rerank(body, self._facts("rerank"), self.limits)
        pairs = [(request.query, text) for text in request.texts]
        rows = await self._tokens(pairs, request.truncate, request.keep_end)
        logits = np.stack(await self._batcher.run(rows))[:, 0].astype(float)
        scores = logits if request.raw_scores else (1 + np.tanh(logits / 2)) / 2  # the sigmoid
        ranked = []
        for place in np.argsort(-scores, kind="stable").tolist():
            one: dict[str, Any] = {"index": place, "score": float(scores[place])}
            if request.return_text:
                one["text"] = request.texts[place]
            ranked.append(one)
        return _json(ranked)

    async def _health(self, body: bytes) -> Reply:
        if self.draining:
            raise RefusedError(503, "the service is about to end")
        return _json({"status": "ok"})

    async def _info(self, body: bytes) -> Reply:
        facts = dataclasses.asdict(self._engine.facts)
        limits = dataclasses.asdict(self.limits)
        return _json({"x86quant": __version__, "model": facts, "limits": limits})

    async def _numbers(self, body: bytes) -> Reply:
        return Reply(200, self._metrics.text(self._batcher.waiting).encode(), CONTENT_TYPE)

    # --- texts to numbers ---

    def _facts(self, task: str) -> EngineFacts:
        facts = self._engine.facts
        if facts.task != task:
            other = "a reranker: POST to /rerank" if task == "embed" else "no reranker"
            raise RefusedError(422, f"{facts.name} is {other}")
        return facts

    async def _embeddings(self, request: EmbedRequest) -> tuple[np.ndarray, int]:
        """float32 [inputs, dimensions], and how many tokens there were."""
        facts = self._engine.facts
        prompt = facts.prompts.get(request.prompt or facts.default_prompt or "", "")
        given = [prompt + one if isinstance(one, str) else one for one in request.inputs]
        rows = await self._tokens(given, request.truncate, request.keep_end)
        found = np.stack(await self._batcher.run(rows))
        if request.dimensions is not None:
            found = np.ascontiguousarray(found[:, : request.dimensions])
        if request.normalize:
            found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found, sum(map(len, rows))

    async def _tokens(
        self, inputs: Sequence[Input], truncate: bool, keep_end: bool
    ) -> list[TokenRow]:
        loop = asyncio.get_running_loop()
        arguments = (inputs, truncate, keep_end)
        return await loop.run_in_executor(self._tokenizing, self._rows, *arguments)

    def _rows(self, inputs: Sequence[Input], truncate: bool, keep_end: bool) -> list[TokenRow]:
        """The tokens of each input.

        Raises:
            RefusedError: one has too many, and is not to be shortened.
        """
        if truncate:
            return [self._shortened(one, keep_end) for one in inputs]
        texts = [one for one in inputs if _is_text(one)]
        found = iter(self._engine.tokenize(texts) if texts else ())
        rows = [next(found) if _is_text(one) else _row_of(one) for one in inputs]
        most = self._engine.facts.max_tokens
        for place, row in enumerate(rows):
            if len(row) > most:
                raise RefusedError(
                    413,
                    f"text {place} has {len(row)} tokens, and the model takes {most}: shorten it, "
                    'or give "truncate": true',
                )
        return rows

    def _shortened(self, one: Input, keep_end: bool) -> TokenRow:
        if _is_text(one):
            return self._engine.shortened(one, keep_end=keep_end)
        ids, most = _row_of(one).ids, self._engine.facts.max_tokens
        return TokenRow(ids[-most:] if keep_end else ids[:most])


_Handler = Callable[[bytes], Coroutine[Any, Any, Reply]]


def _is_text(one: Input) -> TypeGuard[Text]:
    return isinstance(one, str) or isinstance(one[0], str)


def _row_of(ids: Input) -> TokenRow:
    return TokenRow(ids)  # type: ignore[arg-type]


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")


def _json(found: Any) -> Reply:
    if orjson is not None:
        return Reply(200, orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY))
    body = json.dumps(found, separators=(",", ":"), default=np.ndarray.tolist)
    return Reply(200, body.encode())
