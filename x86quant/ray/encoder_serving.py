"""A sentence encoder or reranker served by Ray Serve: the service of ``x86quant serve``, scaled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from x86quant.errors import InvalidInputError
from x86quant.ray.cores import CoreLease, lease
from x86quant.ray.serving import run_application, scaling
from x86quant.service import EncoderService, Engine, EngineFacts, Limits, TokenRow, load_engine
from x86quant.service.engine import Text
from x86quant.service.request_forms import RefusedError
from x86quant.service.server import settle


class PinnedEngine:
    """An engine on cores that no other worker of the machine has."""

    def __init__(self, engine: Engine, cores: CoreLease | None) -> None:
        self._engine, self._cores = engine, cores
        self.facts: EngineFacts = engine.facts

    def tokenize(self, texts: Sequence[Text]) -> list[TokenRow]:
        """As ``Engine`` says."""
        return self._engine.tokenize(texts)

    def shortened(self, text: Text, *, keep_end: bool = False) -> TokenRow:
        """As ``Engine`` says."""
        return self._engine.shortened(text, keep_end=keep_end)

    def run(self, rows: Sequence[TokenRow]) -> np.ndarray:
        """As ``Engine`` says."""
        if self._cores is not None:
            self._cores.settle()
        return self._engine.run(rows)


class EncoderServer:
    """What each replica runs: one model, one queue."""

    def __init__(self, folder: str, limits: Limits, threads: int, pin: bool) -> None:
        engine = load_engine(folder, threads=threads)
        self._service = EncoderService(
            PinnedEngine(engine, lease(threads) if pin else None), limits
        )
        settle()

    async def __call__(self, request: Request) -> Response:
        """Answer a request; Serve cancels this when the client has gone."""
        path = request.url.path.removeprefix(request.scope.get("root_path", "").rstrip("/"))
        body = await request.body()
        most = self._service.limits.body_bytes
        if len(body) > most:
            too_long = RefusedError(413, f"the request has more than {most} bytes")
            reply = self._service.refusal(path, too_long)
            self._service.count(path, reply, 0.0)
        else:
            reply = await self._service.answer(request.method, path, body)
        return Response(reply.body, reply.status, dict(reply.headers), reply.content_type)


def encoder_deployment(
    folder: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
    replicas: int | tuple[int, int] = 1,
    ongoing: int = 16,
    threads: int = 1,
    pin: bool = True,
    name: str = "x86quant",
) -> serve.Application:
    """A Ray Serve application that answers as ``x86quant serve folder`` does.

    Args:
        folder: where the model is; every node must be able to read it.
        limits: of each replica.
        replicas: how many processes, or the least and the most, between which Serve scales them.
        ongoing: requests under way in each replica that scaling aims at.
        threads: threads of each, which Ray counts as so many CPUs.
        pin: hold each replica to cores that no other has, where there are enough.
        name: what Serve calls it.

    Raises:
        InvalidInputError: there is no such folder, or an argument makes no sense.
    """
    if not Path(folder).is_dir():
        raise InvalidInputError(f"{os.fspath(folder)} is no folder with a model")
    if min(threads, ongoing) < 1:
        raise InvalidInputError("threads and ongoing are at least 1")
    limits = limits or Limits()
    kind = serve.deployment(EncoderServer).options(
        name=name,
        max_ongoing_requests=limits.waiting,
        ray_actor_options={"num_cpus": threads},
        **scaling(replicas, ongoing),
    )
    return kind.bind(os.path.abspath(folder), limits, threads, pin)


def serve_encoder(
    folder: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    route: str = "/",
    name: str = "x86quant",
    **options: Any,
) -> Any:
    """Serve the model in ``folder`` at ``http://host:port/route``, and return a handle to it.

    Starts Ray and Serve unless they run. ``options`` are those of ``encoder_deployment``.

    Raises:
        InvalidInputError: the port is taken, or Serve runs at another one already.
        UnsupportedError: a node of the cluster lacks x86quant, or has another version.
    """
    application = encoder_deployment(folder, name=name, **options)
    return run_application(application, host=host, port=port, route=route, name=name)
